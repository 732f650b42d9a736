"""GrammarCompiler: compiles grammars with llguidance on a thread, and caches them.

A compiled grammar is not modified: every request gets a copy of its own, which takes some microseconds. The constructor
of llguidance does not hold the interpreter lock. A grammar that exceeds the limits of a mask fails its own row.
"""

import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from headstart.core.errors import InvalidRequestError
from headstart.gguf.tokenizer_json import FILE_NAME, read_tokenizer_json

MAX_GRAMMARS = 256
MAX_BYTES = 8 << 20  # of the text of all cached grammars


class CachingGrammarCompiler:
    """The compiled grammars of one model, by their text. Implements core's GrammarCompiler; thread-safe."""

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: Sequence[int], limits: LLParserLimits) -> None:
        """The tokenizer is read from the model's folder or GGUF file with the first grammar.

        `vocab_size`: rows of the logits.
        """
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(eos_token_ids)
        self._folder = folder
        self._limits = limits
        self._tokenizer: LLTokenizer | None = None
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._num_bytes = 0
        self._pending: OrderedDict[str, deque[tuple[str, Future[LLMatcher]]]] = OrderedDict()  # by tenant, next first
        self._thread = ThreadPoolExecutor(1, "grammars")

    def begin_compile(self, grammar: str, tenant: str = "") -> "Future[LLMatcher]":
        """Begin to compile a grammar unless it is cached. The future raises InvalidRequestError for an invalid one."""
        with self._lock:
            known = self._compiled.get(grammar)
            if known is not None:
                self._compiled.move_to_end(grammar)
                return known
            future = self._compiled[grammar] = Future()
            self._pending.setdefault(tenant, deque()).append((grammar, future))
            self._thread.submit(self._compile_next)
            self._num_bytes += len(grammar)
            while len(self._compiled) > MAX_GRAMMARS or (self._num_bytes > MAX_BYTES and len(self._compiled) > 1):
                evicted, _ = self._compiled.popitem(last=False)
                self._num_bytes -= len(evicted)
            return future

    def matcher(self, grammar: str) -> LLMatcher:
        """Return a matcher in the initial state; compiles the grammar if it is not cached. Raises as `compile`."""
        return self.begin_compile(grammar).result().deep_copy()

    def _compile_next(self) -> None:
        """Compile a grammar of the tenant whose turn it is."""
        with self._lock:
            tenant, grammars = next(iter(self._pending.items()))
            grammar, future = grammars.popleft()
            self._pending.move_to_end(tenant)
            if not grammars:
                del self._pending[tenant]
        try:
            future.set_result(self._compile(grammar))
        except BaseException as error:
            future.set_exception(error)

    def _compile(self, grammar: str) -> LLMatcher:
        if self._tokenizer is None:
            self._tokenizer = self._load()
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise InvalidRequestError(f"the grammar cannot be compiled: {_first_line(matcher.get_error())}")
        return matcher

    def _load(self) -> LLTokenizer:
        text = read_tokenizer_json(self._folder)
        if text is None:
            raise InvalidRequestError(f"structured output needs the model's {FILE_NAME}, which it does not have")
        eos = [token for token in self.eos_token_ids if token < self.vocab_size]
        return LLTokenizer(text, n_vocab=self.vocab_size, eos_token=eos or None)


def _first_line(message: str) -> str:
    return message.strip().split("\n", 1)[0][:300]
