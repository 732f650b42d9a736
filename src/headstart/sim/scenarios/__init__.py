"""Scenarios: events of a simulated fleet, read from a file and applied to it."""
