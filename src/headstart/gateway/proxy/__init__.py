"""Proxying: one request from the routing decision to its last byte."""
