"""Experiments on routing: decisions, policies, failover, and fleets in real and virtual time."""
