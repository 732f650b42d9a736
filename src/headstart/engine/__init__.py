"""The engine: built from options; in a process of its own behind a channel, or with `LLM` in the caller's."""
