"""The policy core of the router: the choice of a replica. No I/O, no clock, no randomness of its own."""
