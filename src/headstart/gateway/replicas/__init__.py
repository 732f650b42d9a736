"""Replicas: addresses, probes, processes on this machine."""
