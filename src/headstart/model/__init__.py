"""The executor on torch: weights, layers, KV, attention, sampling, setup. The package file imports nothing."""
