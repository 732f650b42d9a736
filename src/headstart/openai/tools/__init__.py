"""Tools and reasoning: tool definitions, the output formats of model families, their parsers and grammars."""
