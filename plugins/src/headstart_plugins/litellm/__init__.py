"""LiteLLM: deployments are chosen by Headstart's router, by cached prefixes and load."""
