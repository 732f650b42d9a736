"""Experiments on one engine: reuse, scheduling, kernels."""
