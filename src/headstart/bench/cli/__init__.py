"""`headstart bench ...`: one verb per benchmark."""
