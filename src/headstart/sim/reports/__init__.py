"""Simulated fleets and capacity plans as reports: `headstart simulate` and `headstart plan`."""
