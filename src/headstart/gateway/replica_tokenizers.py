"""The router's tokenizer: that of the replicas, if its files are on this machine. Nothing is ever downloaded."""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import huggingface_hub

from headstart.bundled import BUNDLED_NAME, bundled_intent_model_folder
from headstart.bundled.packaged_models import find_packaged_model_file
from headstart.core.errors import ConfigError
from headstart.gateway.replicas.probes import ModelCard
from headstart.gguf.gguf_reader import has_gguf_suffix
from headstart.gguf.tokenizer_json import FILE_NAME
from headstart.openai.tokenizer.tokenizer import Tokenizer


def load_named_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer of a folder or GGUF, of a downloaded model, or of the bundled one. Raises ConfigError."""
    folder = _folder(name)
    if folder is None:
        raise ConfigError(
            f"tokenizer {name!r} is no folder or GGUF, and no model that was downloaded here; name a folder "
            f"with a tokenizer.json, or none to count prompts in bytes"
        )
    return Tokenizer.from_folder(folder)


def find_tokenizer_of_models(cards: Iterable[ModelCard]) -> Tokenizer | None:
    """Return the tokenizer of the one served model, if it is on this machine; None: prompts are counted in bytes.

    Engines name it as `root` (vLLM: a folder or hub id) or by the model's own id.
    """
    bases = [card for card in cards if card.parent is None]
    roots = {str(card.fields.get("root") or card.id) for card in bases}
    if len(roots) != 1:
        return None
    for name in (*roots, *(card.id for card in bases)):
        folder = _folder(name)
        if folder is not None:
            try:
                return Tokenizer.from_folder(folder)
            except ConfigError:
                continue
    return None


def _folder(name: str) -> Path | None:
    with suppress(OSError, RuntimeError):  # a name that no file can have, a home directory that does not exist
        path = Path(name).expanduser()
        if name and ((path / FILE_NAME).is_file() or (has_gguf_suffix(path) and path.is_file())):
            return path
    if name == BUNDLED_NAME:
        return bundled_intent_model_folder()
    if (packaged := find_packaged_model_file(name)) is not None:
        return packaged
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        return None
    try:
        cached = huggingface_hub.try_to_load_from_cache(name, FILE_NAME)
    except ValueError:  # no hub id
        return None
    return Path(cached).parent if isinstance(cached, str) else None
