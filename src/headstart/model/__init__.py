"""The executor on torch: weights, layers, KV, attention, sampling, setup. This file imports nothing, on purpose."""
