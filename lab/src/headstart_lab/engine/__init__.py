"""Experiments on one engine: prefix reuse, scheduling, kernels."""
