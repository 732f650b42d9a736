"""libllama through llama-cpp-python's bindings: its batch API in this process, stepped by a small scheduler of ours.

This is llama.cpp's best case, better than its own server: there is no HTTP, and a prefix held by any sequence is
copied to the next one by `llama_memory_seq_cp`, which llama-server never does. The scheduler is simple: every decoding
stream gets its token, the rest of the batch is prefill in order of arrival, and a request waits while another request
computes a prefix of it. Only a sequence's own tokens count as its cache.

Two layouts of llama.cpp's KV cache. Streams: a buffer per sequence, attention reads its own, a copy moves the bytes.
`unified`: all sequences in one buffer, copies share cells, attention reads every cell of it; faster if all sequences
share one prefix, and much slower with several prefixes.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from llama_cpp import llama_cpp as lib
from numpy.typing import NDArray
from serve import GREEDY, News, Sampling

WORTH_SHARING = 32  # tokens; a shorter prefix is computed again
NO_ROOM = 1  # llama_decode found no cells
BF16 = 30  # ggml's type; the bindings do not define it


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of llama.cpp; the defaults are the best found."""

    threads: int = 2
    slots: int = 64  # sequences at once, including idle ones that hold a prefix
    context: int = 2304  # tokens a sequence can hold
    batch: int = 2048  # tokens a call of llama_decode takes
    ubatch: int = 512  # tokens one graph computes
    unified: bool = False
    flash: bool = False  # on a CPU plain attention is faster with several sequences, and as fast with one
    kv: str = "f16"


@dataclass(slots=True)
class Slot:
    """One sequence of the KV cache: the tokens it holds and the request that uses it, if any."""

    seq_id: int
    tokens: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    request: "Asked | None" = None
    used_at: int = 0  # number of the step that used it last


@dataclass(slots=True)
class Asked:
    """A request: its prompt and, while it decodes, the generated tokens."""

    request_id: str
    prompt: NDArray[np.int32]
    output: int
    cached: int = 0
    made: list[int] = field(default_factory=list)


class LibraryStepper:
    """libllama as a stepper (see serve.py). Greedy; the end-of-sequence token does not end a request."""

    def __init__(self, path: str, settings: Settings) -> None:
        self.settings = settings
        lib.llama_backend_init()
        self._model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
        assert self._model, f"llama.cpp cannot load {path}"
        self.vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        self._context = lib.llama_init_from_model(self._model, _context_params(settings))
        assert self._context, f"llama.cpp cannot make a context with {settings}"
        self._memory = lib.llama_get_memory(self._context)
        self._batch = lib.llama_batch_init(settings.batch, 0, 1)
        self._slots = [Slot(index) for index in range(settings.slots)]
        self._waiting: list[Asked] = []
        self._step = 0

    def add(self, request_id: str, prompt: list[int], output: int, sampling: Sampling) -> None:
        assert sampling == GREEDY, "this driver does not sample"
        assert len(prompt) + output <= self.settings.context, f"{len(prompt)} + {output} > {self.settings.context}"
        self._waiting.append(Asked(request_id, np.asarray(prompt, np.int32), output))

    def abort(self, request_ids: list[str]) -> None:
        self._waiting = [asked for asked in self._waiting if asked.request_id not in request_ids]
        for slot in self._slots:
            if slot.request is not None and slot.request.request_id in request_ids:
                slot.request = None

    def reset(self) -> bool:
        """Clear the cache; return False if requests are in flight."""
        if self._waiting or any(slot.request for slot in self._slots):
            return False
        lib.llama_memory_clear(self._memory, False)
        self._slots = [Slot(index) for index in range(self.settings.slots)]
        return True

    def step(self) -> Sequence[News]:
        self._step += 1
        self._admit()
        plan = self._plan()
        sampled = self._decode(plan)
        news: list[News] = []
        for (slot, tokens), token in zip(plan, sampled, strict=True):
            asked = slot.request
            assert asked is not None
            slot.tokens = np.concatenate((slot.tokens, tokens))
            if token is None:
                continue
            asked.made.append(token)
            is_finished = len(asked.made) == asked.output
            news.append(News(asked.request_id, 1, asked.cached, is_finished))
            if is_finished:
                slot.request = None
        return news

    def _admit(self) -> None:
        """Assign a slot to every waiting request that can start now."""
        still_waiting: list[Asked] = []
        for asked in self._waiting:
            held = max(self._slots, key=lambda slot: _shared(slot.tokens, asked.prompt))
            cached = min(_shared(held.tokens, asked.prompt), len(asked.prompt) - 1)
            coming = max((_shared(s.request.prompt, asked.prompt) for s in self._slots if s.request), default=0)
            idle = [slot for slot in self._slots if slot.request is None]
            if not idle or min(coming, len(asked.prompt) - 1) >= cached + WORTH_SHARING:
                still_waiting.append(asked)
                continue
            if held.request is None and (cached * 2 >= len(held.tokens) or len(idle) == 1):
                slot = held
            else:
                others = [slot for slot in idle if slot is not held] or idle
                slot = min(others, key=lambda slot: (slot.used_at, slot.seq_id))
                cached = cached if cached >= WORTH_SHARING else 0
                self._copy(held, slot, cached)
            lib.llama_memory_seq_rm(self._memory, slot.seq_id, cached, -1)
            slot.tokens, slot.request, asked.cached = slot.tokens[:cached], asked, cached
        self._waiting = still_waiting

    def _copy(self, source: Slot, target: Slot, length: int) -> None:
        lib.llama_memory_seq_rm(self._memory, target.seq_id, -1, -1)
        target.tokens = source.tokens[:length]
        if length and target is not source:  # streams copy whole sequences only; extra tokens are removed later
            lib.llama_memory_seq_cp(self._memory, source.seq_id, target.seq_id, -1, -1)

    def _plan(self) -> list[tuple[Slot, NDArray[np.int32]]]:
        """Return the tokens that each slot computes in this step; sequence ids ascend, as streams of one graph must."""
        plan: list[tuple[Slot, NDArray[np.int32]]] = []
        room = self.settings.batch - sum(1 for slot in self._slots if slot.request and slot.request.made)
        in_order = sorted((slot for slot in self._slots if slot.request), key=lambda slot: int(slot.request.request_id))
        for slot in in_order:
            asked = slot.request
            assert asked is not None
            if asked.made:
                tokens = np.asarray(asked.made[-1:], np.int32)
            else:
                tokens = asked.prompt[len(slot.tokens) : len(slot.tokens) + room]
                room -= len(tokens)
            if len(tokens):
                slot.used_at = self._step
                plan.append((slot, tokens))
        return sorted(plan, key=lambda entry: entry[0].seq_id)

    def _decode(self, plan: list[tuple[Slot, NDArray[np.int32]]]) -> list[int | None]:
        """Compute the plan; return the next token of each slot, None where the prompt continues."""
        batch, at, rows = self._batch, 0, list[int | None]()
        for slot, tokens in plan:
            asked = slot.request
            assert asked is not None
            is_last = len(slot.tokens) + len(tokens) >= len(asked.prompt)
            for offset, token in enumerate(tokens.tolist()):
                batch.token[at] = token
                batch.pos[at] = len(slot.tokens) + offset
                batch.n_seq_id[at] = 1
                batch.seq_id[at][0] = slot.seq_id
                batch.logits[at] = 0
                at += 1
            batch.logits[at - 1] = int(is_last)
            rows.append(at - 1 if is_last else None)
        batch.n_tokens = at
        if not at:
            return []
        while (answer := lib.llama_decode(self._context, batch)) == NO_ROOM and self._evict():
            pass
        assert answer == 0, f"llama_decode answered {answer} to {at} tokens"
        return [None if row is None else self._argmax(row) for row in rows]

    def _argmax(self, row: int) -> int:
        logits = lib.llama_get_logits_ith(self._context, row)
        return int(np.ctypeslib.as_array(logits, (self.vocab_size,)).argmax())

    def logits(self, prompt: list[int]) -> NDArray[np.float32]:
        """Return the logits after a prompt, for checks against another engine. Clears the cache."""
        self.reset()
        slot = self._slots[0]
        slot.request = Asked("0", np.asarray(prompt, np.int32), 1)
        self._decode([(slot, slot.request.prompt)])
        slot.request = None
        row = lib.llama_get_logits_ith(self._context, len(prompt) - 1)
        found = np.ctypeslib.as_array(row, (self.vocab_size,)).copy()
        self.reset()
        return found

    def _evict(self) -> bool:
        """Free the cells of the least recently used idle slot; False: there is none."""
        held = [slot for slot in self._slots if slot.request is None and len(slot.tokens)]
        if not held:
            return False
        slot = min(held, key=lambda slot: slot.used_at)
        lib.llama_memory_seq_rm(self._memory, slot.seq_id, -1, -1)
        slot.tokens = slot.tokens[:0]
        return True


def _shared(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """Return the length of the common prefix."""
    length = min(len(a), len(b))
    if not length or a[0] != b[0]:
        return 0
    differs = a[:length] != b[:length]
    first = int(differs.argmax())
    return first if differs[first] else length


def _context_params(settings: Settings) -> lib.llama_context_params:
    params = lib.llama_context_default_params()
    params.n_ctx = settings.slots * settings.context
    params.n_batch = settings.batch
    params.n_ubatch = settings.ubatch
    params.n_seq_max = settings.slots
    params.n_threads = params.n_threads_batch = settings.threads
    params.flash_attn_type = int(settings.flash)
    params.kv_unified = settings.unified
    kinds = {"f16": lib.GGML_TYPE_F16, "bf16": BF16, "f32": lib.GGML_TYPE_F32, "q8_0": lib.GGML_TYPE_Q8_0}
    params.type_k = params.type_v = kinds[settings.kv]
    params.no_perf = True
    return params


def system_info() -> str:
    """Return the instruction sets that the library was built with and uses, in its own format."""
    return ctypes.string_at(lib.llama_print_system_info()).decode().strip()
