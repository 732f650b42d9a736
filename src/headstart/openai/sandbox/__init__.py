"""Processes with limits of time and memory, for work on input that may be hostile."""
