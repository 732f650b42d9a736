"""Discovery: the list of replicas: given, of a file, of DNS, of Kubernetes (needs the extra [kubernetes])."""
