"""Sampling: logit edits, the draw, log-probabilities."""
