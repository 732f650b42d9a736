"""Experiments on the block store: restarts, shared folders, writing behind."""
