"""Headstart: an LLM inference server with prefix caching."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_LAZY = {"LLM": "headstart.llm", "Completion": "headstart.llm", "SamplingParams": "headstart.core.request"}


def __getattr__(name: str) -> Any:
    """Return LLM, Completion or SamplingParams, imported on first use; `import headstart` imports none of them."""
    if name not in _LAZY:
        raise AttributeError(f"module 'headstart' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
