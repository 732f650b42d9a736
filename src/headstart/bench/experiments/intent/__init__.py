"""The intent-recognition benchmark: latency, throughput and accuracy with and without prefix caching."""
