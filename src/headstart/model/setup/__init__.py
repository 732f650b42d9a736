"""Threads, memory and the sizing of the KV pool, before a model is loaded."""
