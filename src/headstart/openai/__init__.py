"""The OpenAI API without HTTP: request parsing, responses, tokenization, text. Also used by `headstart.LLM`."""
