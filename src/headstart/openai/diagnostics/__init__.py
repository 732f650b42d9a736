"""Prompt cache diagnostics: fingerprints of prompts, their comparison, and its form in OpenAI's APIs."""
