"""Explanations: why a prompt was reused as far as it was. Standard library only."""
