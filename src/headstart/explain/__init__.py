"""Explanations of cache reuse and cache misses. Standard library only."""
