"""The engine process, and its channel to the HTTP process."""
