"""KV events of replicas: sockets, decoding, and bounds."""
