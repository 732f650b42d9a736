"""Discovery: the list of replicas."""
