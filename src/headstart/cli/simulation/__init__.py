"""The verbs `simulate` and `plan`: a fleet in virtual time."""
