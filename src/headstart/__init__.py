"""Headstart serves language models without ever computing the same prefix twice."""

__version__ = "0.1.0"
