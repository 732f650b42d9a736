"""Attention over paged KV: the protocol, the table of backends and the ATen reference."""
