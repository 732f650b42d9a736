"""Envoy in front of replicas: the endpoint picker protocol, Envoy's configuration and its process."""
