"""Blocks on disk: one folder of append-only segment files for all processes of a machine. Independent of torch."""
