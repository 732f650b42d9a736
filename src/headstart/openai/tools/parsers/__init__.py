"""Parsers of model output: text in pieces -> reasoning, content and tool calls."""
