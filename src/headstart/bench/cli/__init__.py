"""The commands of `headstart bench ...`: one verb per benchmark."""
