"""Ray Serve: Ray places, restarts and scales the replicas over machines. Needs the extra [ray]."""
