"""Options, and headstart.toml."""
