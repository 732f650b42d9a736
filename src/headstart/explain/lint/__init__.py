"""The prefix doctor: a log of requests -> what was recomputed although it could have been reused, by cause."""
