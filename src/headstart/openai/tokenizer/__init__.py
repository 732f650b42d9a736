"""Tokenizers of model folders, and the memory of segments already tokenized."""
