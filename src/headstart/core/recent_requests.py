"""RecentRequests: the latest requests, for the explainer only. Bounded in requests and in prompt tokens.

Nothing is copied: an entry refers to the scheduler's own Sequence, whose tokens and hashes remain after it has
finished. Facts that cannot be reconstructed later are recorded when they occur: where reuse stopped at first admission,
whether the first missing block had been evicted by then, and the prompt token breakdown (each once per request).
Requests that computed pinned prefixes are kept longer than the others, one for each prefix until it is removed: other
prompts are expected to begin like them.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

from headstart.core.batch import Chunk, PromptTokenBreakdown, RequestStepOutput
from headstart.core.cache.block_pool import BlockPool
from headstart.core.cache.history import EvictionRecord
from headstart.core.cache.pinned_prefixes import REQUEST_PREFIX
from headstart.core.sequence import Sequence

MAX_REQUESTS = 1000
MAX_TOKENS = 1 << 20  # of prompts
MAX_PREFIXES = 64


@dataclass(slots=True, eq=False)
class AdmittedRequest:
    """One request and its outcome. `admitted` and `answered` are numbers of steps."""

    seq: Sequence
    order: int
    start: int  # first token computed at its first admission: where reuse stopped
    admitted: int
    evicted: EvictionRecord | None = None  # eviction, by then, of the block that contains that token
    has_kv: bool = False  # whether that block was there, but no recurrent state to go on from
    first_token_step: int | None = None  # step of its first output token: the whole prompt is computed
    breakdown: PromptTokenBreakdown | None = None

    @property
    def request_id(self) -> str:
        return self.seq.request.request_id


class RecentRequests:
    """The last requests that were admitted, by id and by age."""

    def __init__(self, max_requests: int = MAX_REQUESTS, max_tokens: int = MAX_TOKENS) -> None:
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self._seen: dict[str, AdmittedRequest] = {}  # in order of admission
        self._prefixes: dict[str, AdmittedRequest] = {}  # requests that compute pinned prefixes; not in _seen
        self._queued: set[str] = set()  # not admitted yet
        self._open: dict[str, AdmittedRequest] = {}  # admitted, no token yet
        self._num_tokens = 0
        self._num_admitted = 0
        self._num_steps = 0

    def __len__(self) -> int:
        return len(self._seen) + len(self._prefixes)

    def __iter__(self) -> Iterator[AdmittedRequest]:
        """Iterate newest first, requests of pinned prefixes last."""
        return chain(reversed(self._seen.values()), reversed(self._prefixes.values()))

    def find(self, request_id: str) -> AdmittedRequest | None:
        """Return the request with that id; None if it was not admitted or has been dropped since."""
        return self._seen.get(request_id) or self._prefixes.get(request_id)

    def record_queued(self, request_id: str) -> None:
        """Record that a request was queued."""
        self._queued.add(request_id)

    def record_planned(
        self, chunks: Iterable[Chunk], running: Iterable[Sequence], pool: BlockPool, block_size: int
    ) -> None:
        """Record the requests that are in a batch for the first time, before it is computed."""
        self._num_steps += 1
        if not self._queued:
            return
        starts = {chunk.request_id: chunk.start for chunk in chunks if chunk.request_id in self._queued}
        if not starts:
            return
        for seq in running:
            start = starts.get(seq.request.request_id)
            if start is not None:
                block_hashes, index = seq.block_hashes, start // block_size
                self._add(
                    seq, start, pool.find_eviction_record(block_hashes[index]) if index < len(block_hashes) else None
                )
                self._open[seq.request_id].has_kv = seq.junction > index

    def record_prompt_breakdowns(self, outputs: Iterable[RequestStepOutput], *, num_later: int = 0) -> None:
        """Record the prompt token breakdown of requests whose first token is among the outputs of a step.

        `num_later` steps have been planned since.
        """
        if not self._open:
            return
        for output in outputs:
            if output.breakdown is None and output.finish_reason is None:
                continue
            seen = self._open.pop(output.request_id, None)
            if seen is not None and output.breakdown is not None:
                seen.breakdown, seen.first_token_step = output.breakdown, self._num_steps - num_later

    def record_aborted(self, request_id: str) -> None:
        """Record that a request was aborted; its entry stays."""
        self._queued.discard(request_id)
        self._open.pop(request_id, None)

    def forget_prefix(self, name: str) -> None:
        """Drop the request that computed a pinned prefix, which is ordinary cache from now on."""
        for request_id in [other for other in self._prefixes if _prefix_name(other) == name]:
            del self._prefixes[request_id]

    def _add(self, seq: Sequence, start: int, evicted: EvictionRecord | None) -> None:
        """Add a request, and drop the oldest ones beyond the limits."""
        request_id = seq.request.request_id
        self._forget(request_id)
        self._queued.discard(request_id)
        seen = AdmittedRequest(seq, self._num_admitted, start, self._num_steps, evicted)
        self._num_admitted += 1
        self._open[request_id] = seen
        if request_id.startswith(REQUEST_PREFIX):
            self._add_prefix(seen)
            return
        self._seen[request_id] = seen
        self._num_tokens += len(seq.request.prompt)
        while len(self._seen) > self.max_requests or (self._num_tokens > self.max_tokens and len(self._seen) > 1):
            self._forget(next(iter(self._seen)))

    def _add_prefix(self, seen: AdmittedRequest) -> None:
        """Add a prefix request, replacing the earlier one of the same prefix."""
        self.forget_prefix(_prefix_name(seen.request_id))
        if len(self._prefixes) >= MAX_PREFIXES:
            del self._prefixes[next(iter(self._prefixes))]
        self._prefixes[seen.request_id] = seen

    def _forget(self, request_id: str) -> None:
        seen = self._seen.pop(request_id, None)
        if seen is not None:
            self._num_tokens -= len(seen.seq.request.prompt)
            self._open.pop(request_id, None)


def _prefix_name(request_id: str) -> str:
    """Return the name of the prefix that the request computes; its id ends in a unique number."""
    return request_id.removeprefix(REQUEST_PREFIX).rpartition(":")[0]
