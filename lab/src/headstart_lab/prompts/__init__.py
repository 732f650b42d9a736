"""Prompts of agents: canonical rules, the prompt doctor, and what both cost, on recorded chats."""
