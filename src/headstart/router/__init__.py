"""The policy core of routing: which replica is asked. No I/O, no clock, no chance of its own; bodies go around it."""
