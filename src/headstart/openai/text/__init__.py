"""Output tokens as text: detokenization, stop strings, log-probabilities."""
