"""Discovery: which replicas there are."""
