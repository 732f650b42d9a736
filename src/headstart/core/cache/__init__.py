"""The KV cache: blocks, their hashes, reuse, eviction, pinned prefixes."""
