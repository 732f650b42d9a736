"""The generation APIs of the server: each prepares requests from bodies and formats answers."""
