"""Checkpoints: configuration, weights, and where they come from."""
