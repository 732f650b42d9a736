"""The executor on torch: weights, layers, KV, attention, sampling, and what surrounds them. Import-light on purpose."""
