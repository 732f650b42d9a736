"""The API server: OpenAI's HTTP API and tokenization. The engine runs in its own process; no torch here."""
