"""The exit code of Ctrl-C, and the variable that replaces it. Imports nothing: __main__.py does."""

INTERRUPTED = 130
INTERRUPT_VARIABLE = "HEADSTART_INTERRUPT_CODE"
