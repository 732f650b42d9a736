"""Resolution of the model argument of `serve` to a folder: an existing folder, or a download from the hub.

Downloads only data (safetensors, JSON, tokenizer and template text), never pickles or code. It skips subfolders, where
repositories keep the same weights in other formats.
"""

import contextlib
import re
from importlib import import_module
from pathlib import Path
from typing import Any

from headstart.core.errors import ConfigError
from headstart.gguf.gguf_reader import LFS_POINTER, has_gguf_suffix, refuse_lfs_pointer
from headstart.model.weights.json_file import one_line_error, shorten_text

MAX_NAME_CHARS = 4096  # the longest path Linux takes; hub ids have at most 96 characters
SHOWN_CHARS = 80  # maximum characters of a refused name in a message
WANTED = ("*.safetensors", "*.json", "*.txt", "*.jinja", "tokenizer.model", "*.tiktoken")
UNWANTED = ("*/*", "consolidated*.safetensors")  # Mistral's own format: the same weights a second time
_NOT_FIRST = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)  # files of a split model after the first
# Imported for a download: they bring an HTTP client, and take 0.3 seconds of CPU.
_HUB, _CONSTANTS, _ERRORS = "huggingface_hub", "huggingface_hub.constants", "huggingface_hub.errors"


def resolve_model(
    model: str,
    *,
    revision: str | None = None,
    token: str | None = None,
    offline: bool = False,
    download_dir: str | None = None,
    endpoint: str | None = None,
) -> Path:
    """Return the folder of `model`, which is a folder or a hub id such as "Qwen/Qwen3-0.6B".

    `token` None means HF_TOKEN or the stored login, `download_dir` None the hub's own cache, `endpoint` None
    HF_ENDPOINT or the public hub. Progress bars go to stderr. Raises ConfigError, in one line, for any failure.
    """
    folder = local_path_unless_hub_id(model)
    if folder is not None:
        return folder
    hub, constants, errors = map(import_module, (_HUB, _CONSTANTS, _ERRORS))
    try:
        folder = hub.snapshot_download(
            model,
            revision=revision,
            token=token,
            local_files_only=offline,
            cache_dir=download_dir,
            endpoint=endpoint,
            allow_patterns=list(WANTED),
            ignore_patterns=list(UNWANTED),
        )
    except (errors.HFValidationError, errors.EntryNotFoundError, OSError, _network_error(errors)) as error:
        offline = offline or constants.is_offline_mode()
        address = endpoint or constants.ENDPOINT
        raise ConfigError(_explain(error, model, revision, offline=offline, hub=address)) from error
    return _checked(Path(folder), model)


def local_path_unless_hub_id(model: str) -> Path | None:
    """Return the folder or GGUF file named by `model`, or None if it may be a hub id. Raises ConfigError if neither."""
    if len(model) > MAX_NAME_CHARS:
        raise ConfigError(
            f"{shorten_text(model, SHOWN_CHARS)!r} is neither a folder nor a hub id: {len(model)} characters are more "
            f"than {MAX_NAME_CHARS}"
        )
    try:
        path = Path(model).expanduser()
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, ValueError, RuntimeError) as error:  # a part that is too long; a zero byte; an unknown user's home
        raise ConfigError(f"{shorten_text(model, SHOWN_CHARS)!r} cannot be a folder: {one_line_error(error)}") from None
    if model and is_folder:
        return _checked(path, model)
    if is_file and has_gguf_suffix(path):
        return path
    if is_file:
        raise ConfigError(
            f"{model} is a file, and no .gguf; name the folder that holds config.json and the safetensors files"
        )
    if has_gguf_suffix(path):
        raise ConfigError(f"there is no file {shorten_text(model, SHOWN_CHARS)!r}; a GGUF is named by its path")
    if not model or not model.isprintable() or model.startswith((".", "/", "~", "\\")) or model.count("/") > 1:
        named = shorten_text(model, SHOWN_CHARS)
        raise ConfigError(f"there is no folder {named!r}, and it is no hub id either (those look like Qwen/Qwen3-0.6B)")
    return None


def _checked(folder: Path, model: str) -> Path:
    """Return a folder with a model. Raises ConfigError for another one, with the file to name if it holds a GGUF."""
    files = [file for pattern in WANTED for file in folder.glob(pattern) if file.is_file()]
    for file in sorted(files):
        _refuse_pointer(file)
    gguf = sorted(
        file.name for file in folder.iterdir() if has_gguf_suffix(file) and _NOT_FIRST.search(file.name) is None
    )
    if gguf and not any(file.suffix == ".safetensors" for file in files):
        others = "" if len(gguf) == 1 else f" or another of its {len(gguf)} GGUF files"
        raise ConfigError(
            f"{model} holds no *.safetensors but a GGUF, which is named itself: {folder / gguf[0]}{others}"
        )
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{model} has no config.json: it is not a model in Hugging Face's format")
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(
            f"{model} has no *.safetensors weights, and .bin and .pt are not loaded; a GGUF is named itself"
        )
    return folder


def _refuse_pointer(file: Path) -> None:
    """Raise ConfigError for a Git LFS pointer. A file that cannot be read is left to its reader."""
    with contextlib.suppress(OSError), file.open("rb") as stream:
        refuse_lfs_pointer(file, stream.read(len(LFS_POINTER)))


def _explain(error: Exception, model: str, revision: str | None, *, offline: bool, hub: str) -> str:
    """Return one line with the problem and the remedy. The order of the cases matters: subclasses come first."""
    errors = import_module(_ERRORS)
    match error:
        case errors.HFValidationError():
            shown = shorten_text(model, SHOWN_CHARS)
            return f"{shown!r} is neither a folder nor a hub id (those look like Qwen/Qwen3-0.6B)"
        case errors.GatedRepoError():
            return (
                f"{model} is gated: accept its terms at {hub}/{model}, then set HF_TOKEN (or --hf-token) to your token"
            )
        case errors.RepositoryNotFoundError():
            return (
                f"there is no folder and no model on the hub called {model!r}: check the spelling; if it is private, "
                f"set HF_TOKEN (or --hf-token) to a token that may read it"
            )
        case errors.RevisionNotFoundError():
            return f"{model} has no revision {revision!r}: name a branch, tag or commit that its page on the hub lists"
        case errors.LocalEntryNotFoundError() if offline:
            return f"{model} is not (completely) downloaded, and offline mode is on: run once without --offline"
        case errors.HfHubHTTPError() if error.response.status_code in (401, 403):
            status = error.response.status_code
            return f"the hub refuses access to {model} (HTTP {status}): set HF_TOKEN (or --hf-token) to a valid token"
        case _ if isinstance(error, (errors.LocalEntryNotFoundError, _network_error(errors))):
            return (
                f"cannot download {model} from {hub} ({_reason(error)}): are you offline? Check the connection or "
                f"proxy, or name a folder with the model in it"
            )
        case _:
            return f"cannot store or read {model} in the download folder: {_first_line(error)}"


def _network_error(errors: Any) -> type[Exception]:
    """Return the base class of the hub's own error: httpx.HTTPError with hub 1.x, httpx2.HTTPError with 2.x."""
    return errors.HfHubHTTPError.__mro__[1]


def _reason(error: Any) -> str:
    """Return the message of the first error in a chain of wrapped errors."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, import_module(_ERRORS).HfHubHTTPError):
        return f"HTTP {error.response.status_code}"
    return _first_line(error)


def _first_line(error: BaseException) -> str:
    return shorten_text(next(iter(str(error).splitlines()), "") or type(error).__name__)
