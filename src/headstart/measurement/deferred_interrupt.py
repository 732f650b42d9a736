"""Ctrl-C that waits: what changes an engine's state must not be left in its middle."""

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any


@contextmanager
def deferred_interrupt() -> Generator[None]:
    """Hand a Ctrl-C within the block to its handler when the block ends; a second one raises KeyboardInterrupt at once.

    Outside the main thread, and where SIGINT has no handler of Python's, nothing changes.
    """
    pressed: list[Any] = []

    def note(*signal_and_frame: Any) -> None:
        pressed.append(signal_and_frame)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if pressed:
        handler(*pressed[0])
