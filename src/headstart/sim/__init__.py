"""Simulation: a fleet in virtual time on the engine's own scheduler and cache, and the router's own policies."""
