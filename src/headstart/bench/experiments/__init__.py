"""Experiments: each measures one figure and reports it as one JSON document."""
