"""Calibration: a step cost fitted to real steps of a model on this machine, and its check."""
