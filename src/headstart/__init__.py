"""Headstart serves language models without ever computing the same prefix twice."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_LAZY = {"LLM": "headstart.llm", "Completion": "headstart.llm", "SamplingParams": "headstart.core.request"}


def __getattr__(name: str) -> Any:
    """Gives LLM, Completion and SamplingParams, imported on first use: `import headstart` itself costs nothing."""
    if name not in _LAZY:
        raise AttributeError(f"module 'headstart' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
