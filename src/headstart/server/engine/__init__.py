"""The engine process, and the channel between it and the HTTP process."""
