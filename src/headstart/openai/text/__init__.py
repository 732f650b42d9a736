"""Conversion of output tokens to text: detokenization, stop strings, log-probabilities."""
