"""Experiments: each measures one figure, and states it as one JSON document."""
