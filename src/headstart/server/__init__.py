"""The front end: OpenAI's HTTP API, tokenisation and text, around an engine in its own process. Never imports torch."""
