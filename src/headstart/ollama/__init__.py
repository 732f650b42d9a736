"""Ollama's API, translated to and from chats. Without HTTP."""
