"""KV events of replicas: sockets, decoding, and their bounds."""
