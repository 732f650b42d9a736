"""The OpenAI API without HTTP: requests, responses, text. Also used by `headstart.LLM`."""
