"""The commands of `headstart bench ...`."""
