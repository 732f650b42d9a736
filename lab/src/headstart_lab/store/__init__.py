"""Experiments on the block store: restarts, shared folders, write-behind."""
