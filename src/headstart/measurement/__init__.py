"""Measurement: an engine under load in this process, the machine, progress bars and reports."""
