"""Headstart: an LLM inference server with prefix caching."""

from importlib import import_module
from typing import Any

_ENGINE = "headstart.engine.llm"
_LAZY = {"LLM": _ENGINE, "Completion": _ENGINE, "SamplingParams": "headstart.core.request"}


def __getattr__(name: str) -> Any:
    """Return LLM, Completion or SamplingParams, imported on first use, or the version, read on first use."""
    if name == "__version__":
        globals()[name] = found = _installed_version()
        return found
    if name not in _LAZY:
        raise AttributeError(f"module 'headstart' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def _installed_version() -> str:
    """Return the version of the installed package; a checkout that is only on the path has none."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("headstart")
    except PackageNotFoundError:
        return "0+unknown"


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY, "__version__"])
