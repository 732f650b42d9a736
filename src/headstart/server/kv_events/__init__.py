"""KV events for routers, in vLLM's format."""
