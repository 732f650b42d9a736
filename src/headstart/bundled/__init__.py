"""The model in the package, served when none is named: intent recognition by reading a preamble (see intent/README.md)."""

from pathlib import Path

BUNDLED_NAME = "headstart-intent"
"""What the server calls it."""


def bundled_model() -> Path:
    """The folder of the bundled model, in Hugging Face form."""
    return Path(__file__).parent / "intent"
