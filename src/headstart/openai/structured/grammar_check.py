"""GrammarChecker: compiles grammars of requests in a process that can be killed, before the engine compiles them.

So a grammar that takes too much time or memory, or that does not compile, is refused and never reaches the engine.
Accepted grammars are remembered by their hash: each is checked once.
"""

import hashlib
import threading
from collections import OrderedDict
from pathlib import Path

from headstart.core.engine_info import EngineInfo
from headstart.core.errors import ConfigError, InvalidRequestError
from headstart.gguf.tokenizer_json import FILE_NAME, read_tokenizer_json
from headstart.openai.sandbox.sandbox_pool import SandboxLostError, SandboxPool, SandboxSpec

MAX_SECONDS = 1.0
MAX_SETUP_SECONDS = 60.0  # to read the vocabulary, which is the operator's; on a busy machine
MAX_BYTES = 512 << 20  # of memory, while a grammar is compiled
MAX_REMEMBERED = 4096


class GrammarChecker:
    """The check of grammars for one model. Thread-safe; the process starts with the first grammar."""

    def __init__(self, info: EngineInfo, eos_token_ids: tuple[int, ...], *, max_seconds: float = MAX_SECONDS) -> None:
        self._model = Path(info.model)
        self._vocab_size = info.vocab_size
        self._eos_token_ids = eos_token_ids
        self._max_seconds = max_seconds
        self._lock = threading.Lock()
        self._pool: SandboxPool | None = None
        self._accepted: OrderedDict[bytes, None] = OrderedDict()

    def was_accepted(self, grammar: str) -> bool:
        """Return whether a grammar was accepted before."""
        key = _hash(grammar)
        with self._lock:
            if key not in self._accepted:
                return False
            self._accepted.move_to_end(key)
            return True

    def check(self, name: str, grammar: str, tenant: str = "") -> None:
        """Raise InvalidRequestError unless the engine can compile the grammar that the field `name` requests. Blocks.

        Raises QueueFullError while too many grammars wait, and while grammars of `tenant` were killed repeatedly.
        """
        if self.was_accepted(grammar):
            return
        try:
            self._processes().ask(grammar, tenant)
        except SandboxLostError as error:
            raise InvalidRequestError(f"{name} {error} to compile; simplify it", param=name) from None
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{name} cannot be compiled: {error}", param=name) from None
        except ConfigError as error:
            raise InvalidRequestError(f"{name} cannot be used with this model: {error}", param=name) from None
        with self._lock:
            self._accepted[_hash(grammar)] = None
            while len(self._accepted) > MAX_REMEMBERED:
                self._accepted.popitem(last=False)

    def close(self) -> None:
        """End the processes."""
        with self._lock:
            if self._pool is not None:
                self._pool.close()

    def _processes(self) -> SandboxPool:
        with self._lock:
            if self._pool is None:
                text = read_tokenizer_json(self._model)
                if text is None:
                    raise ConfigError(f"structured output needs the model's {FILE_NAME}, which it does not have")
                sandbox = SandboxSpec(
                    module="headstart.openai.structured.grammar_process",
                    setup=(text, self._vocab_size, self._eos_token_ids, self._max_seconds),
                    subject="the compiler of grammars",
                    requests="grammars",
                    max_setup_seconds=MAX_SETUP_SECONDS,
                    max_seconds=self._max_seconds,
                    max_bytes=MAX_BYTES,
                    max_answer_bytes=4096,
                )
                self._pool = SandboxPool(sandbox)
            return self._pool


def _hash(grammar: str) -> bytes:
    return hashlib.sha256(grammar.encode()).digest()
