"""The exit code of Ctrl-C, and the environment variable that overrides it. Imports nothing, for __main__.py."""

INTERRUPTED = 130
INTERRUPT_VARIABLE = "HEADSTART_INTERRUPT_CODE"
