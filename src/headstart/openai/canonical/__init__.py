"""Canonical prompts: named rules that give equal prompts equal text, so that they share a prefix. Off unless chosen."""
