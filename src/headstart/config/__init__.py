"""Options, their sources (flags, environment, headstart.toml), and hints for unknown options."""
