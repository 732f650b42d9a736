"""HTTP for the server and the gateway: limits, keys, access lines, errors."""
