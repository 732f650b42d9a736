"""Prefix indexes: the router's model of the prefix cache of each replica."""
