"""Structured output: request fields, the grammars they mean, and the check of grammars before they reach the engine."""
