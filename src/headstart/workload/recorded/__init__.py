"""Recorded traffic: files of traces, the units of their numbers, sessions of coding agents."""
