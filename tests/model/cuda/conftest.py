"""Triton's interpreter, for tests of kernels: what it puts in place for a launch stays there for the next one.

Otherwise it replaces some hundred functions of `triton.language` at each launch, and again at each call of one kernel
function by another, which takes most of a launch's time. In this process nothing is compiled.
"""

from collections.abc import Callable
from typing import Any

from triton.runtime import interpreter


def patch_once(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a `patch` that does its work once for the functions of a module, and never undoes it."""
    patched: set[str] = set()

    def patch_module(function: Any) -> Any:
        if function.__module__ not in patched:
            patch(function)
            patched.add(function.__module__)
        return interpreter._LangPatchScope()  # nothing to restore

    return patch_module


interpreter._patch_lang = patch_once(interpreter._patch_lang)
