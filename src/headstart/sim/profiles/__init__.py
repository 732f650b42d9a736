"""Profiles by name, from datasheets, from files, and fitted to measured steps."""
