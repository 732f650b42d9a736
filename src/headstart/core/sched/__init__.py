"""Scheduling: the waiting queue, admission, and the plan of one step."""
