"""Grammars that constrain the output: compilation, and the mask of allowed tokens of each row."""
