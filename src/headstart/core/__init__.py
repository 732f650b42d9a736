"""The engine core: requests, KV blocks, the scheduler. Standard library only, no clock, no randomness."""
