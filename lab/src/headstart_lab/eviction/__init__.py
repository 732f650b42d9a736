"""Eviction: policies replayed on traces, queued references and retention hints in virtual time."""
