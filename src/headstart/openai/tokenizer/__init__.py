"""Tokenizers of model folders, and a cache of tokenized segments."""
