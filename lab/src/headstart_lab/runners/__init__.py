"""Servers and routers under load, and their stand-ins: fake replicas, a null executor, virtual time."""
