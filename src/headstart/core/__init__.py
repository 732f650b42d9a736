"""The floor everyone stands on: requests, blocks, the scheduler. Standard library only, no clock, no randomness."""
