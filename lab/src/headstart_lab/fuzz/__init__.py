"""Hostile and legal requests, drawn at random, against a running server."""
