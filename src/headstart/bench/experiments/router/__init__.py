"""Experiments on routing: decisions, policies, failover, and fleets real and virtual."""
