"""GGUF files: tensors, their block formats, and settings in the form of a model folder."""
