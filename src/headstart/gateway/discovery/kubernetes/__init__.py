"""Discovery from Kubernetes: pods of an InferencePool, endpoints of a Service. Needs the extra [kubernetes]."""
