"""Sampling defaults of a model, of its generation_config.json or GGUF metadata. Values of a request override them."""

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from headstart.bundled.packaged_models import packaged_model_of_file
from headstart.core.errors import ConfigError, InvalidRequestError
from headstart.core.request import NO_DEFAULTS, SamplingDefaults
from headstart.gguf.gguf_reader import has_gguf_suffix, read_gguf
from headstart.openai.bounds import RequestBounds
from headstart.openai.generation_fields import GenerationConfigFields
from headstart.openai.request_model import validate_as

FILE = "generation_config.json"
AUTO = "auto"  # the model's own file, if it has one
NONE = ("none", "vllm")  # the API's defaults only; vLLM's value for this is "vllm"
MAX_FILE_BYTES = 1 << 20
_GGUF_KEYS = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "top_k": "general.sampling.top_k",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
_NO_BOUNDS = RequestBounds(vocab_size=0, max_model_len=0)  # the ranges of these keys depend on no model


def read_sampling_defaults(folder: Path, source: str = AUTO) -> SamplingDefaults:
    """Return the defaults of a model in `folder` for `--generation-config SOURCE`.

    `auto` reads the model's own file if it exists, or the metadata of a GGUF file; `none` reads nothing; any other
    value is the file or a folder with it. Raises ConfigError, in one line with file and key, for values that are
    invalid in a request.
    """
    if source in NONE:
        return NO_DEFAULTS
    if source == AUTO and has_gguf_suffix(folder):
        return _of_gguf(folder)
    path = folder / FILE if source == AUTO else _named(source)
    if source == AUTO and not path.is_file():
        return NO_DEFAULTS
    try:
        return _defaults(_read(path))
    except InvalidRequestError as error:
        remedy = "name another file, or leave them out" if source != AUTO else "correct it, or ignore it"
        raise ConfigError(f"{path}: {error}: {remedy} with --generation-config none") from None


def _of_gguf(path: Path) -> SamplingDefaults:
    """Return the defaults in the metadata of a GGUF file (general.sampling.temp, ...), which few files have.

    Those of packaged models are known here (bundled/packaged_models.py); metadata override them.
    """
    metadata = read_gguf(path).metadata
    in_file = {name: metadata[key] for name, key in _GGUF_KEYS.items() if key in metadata}
    packaged = packaged_model_of_file(path)
    names = {**({} if packaged is None else packaged.sampling), **in_file}
    try:
        return _defaults(
            {name: round(value, 6) if isinstance(value, float) else value for name, value in names.items()}
        )
    except InvalidRequestError as error:
        raise ConfigError(f"{path}: {error}: ignore it with --generation-config none") from None


def describe_sampling_defaults(defaults: SamplingDefaults) -> list[str]:
    """Return the values that a model sets as texts for people: "temperature 0.6", ..."""
    found = ((field.name, getattr(defaults, field.name)) for field in fields(defaults))
    return [f"{name} {value}" for name, value in found if value is not None]


def _named(source: str) -> Path:
    path = Path(source).expanduser()
    path = path / FILE if path.is_dir() else path
    if not source or not path.is_file():
        raise ConfigError(
            f"generation_config is {source!r}; it must be auto, none, or a folder with a {FILE} (or such a file)"
        )
    return path


def _read(path: Path) -> Mapping[str, Any]:
    try:
        if (size := path.stat().st_size) > MAX_FILE_BYTES:
            raise ConfigError(f"{path} has {size} bytes; at most {MAX_FILE_BYTES} are read")
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, no JSON
        raise ConfigError(f"{path} cannot be read: {' '.join(str(error).split())[:200]}") from None
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return values


def _defaults(values: Mapping[str, Any]) -> SamplingDefaults:
    """Return the defaults; null counts as absent. Raises InvalidRequestError, which names the key."""
    found = validate_as(GenerationConfigFields, values, _NO_BOUNDS)
    return SamplingDefaults(
        temperature=found.temperature if found.do_sample else 0.0,  # greedy, regardless of the other values
        top_p=found.top_p,
        top_k=found.top_k,
        min_p=found.min_p,
        repetition_penalty=found.repetition_penalty,
        max_tokens=found.max_new_tokens,
    )
