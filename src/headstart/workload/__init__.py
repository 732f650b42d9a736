"""Synthetic workloads, trace readers and request records."""
