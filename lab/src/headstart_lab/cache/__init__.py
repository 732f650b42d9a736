"""Experiments on the prefix cache alone."""
