"""Models of response bodies, for /openapi.json. Responses are built as plain dicts and tested against these."""
