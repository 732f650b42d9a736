"""GGUF files: block formats of packed weights, and their names and shapes as those of a model folder."""
