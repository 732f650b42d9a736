"""Runners: an engine, a server or a router under load, and the processes that a benchmark starts."""
