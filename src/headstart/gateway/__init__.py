"""I/O around the routing core: sockets, clocks and processes between clients and replicas."""
