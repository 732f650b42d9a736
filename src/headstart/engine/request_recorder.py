"""RequestRecorder: the lengths, times and block hashes of a server's requests, as lines of a router's decision log.

No text and no token leaves it: block hashes are cut to eight bytes and derived from a random key of this process, so
that they show which prompts of one recording share a prefix, and cannot be compared with a guessed prompt.
"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headstart.core.batch import RequestStepOutput
from headstart.core.cache.hashing import BlockHash, extend_block_hashes, root_hash
from headstart.core.request import Request
from headstart.router.decision_log import DecisionRecord, join_hashes


@dataclass(slots=True, eq=False)
class _Open:
    """A request that has not ended."""

    request: Request
    block_size: int
    at: float
    first_token: float | None = None
    num_output: int = 0
    cached_tokens: int | None = None


class RequestRecorder:
    """Passes a record of each request that had an output to `write` when it has ended."""

    def __init__(self, write: Callable[[DecisionRecord], None]) -> None:
        self._write = write
        self._key = secrets.token_bytes(32)
        self._open: dict[str, _Open] = {}

    def record_submitted(self, requests: Sequence[Request], block_size: int, now: float) -> None:
        """Note requests that are sent to the engine; `now` in seconds."""
        for request in requests:
            self._open[request.request_id] = _Open(request, block_size, now)

    def record_output(self, output: RequestStepOutput, now: float) -> None:
        """Note an output of the engine."""
        one = self._open.get(output.request_id)
        if one is None:
            return
        if output.token_ids:
            one.num_output += len(output.token_ids)
            one.first_token = now if one.first_token is None else one.first_token
            one.cached_tokens = output.num_cached_tokens
        if output.finish_reason is not None:
            self.record_end(output.request_id, now)

    def record_end(self, request_id: str, now: float) -> None:
        """Record a request that has ended or was aborted, as by a stop string. Unknown ones are ignored."""
        one = self._open.pop(request_id, None)
        if one is not None and one.num_output:
            self._write(self._record(one, now))

    def _record(self, one: _Open, now: float) -> DecisionRecord:
        request = one.request
        names: list[BlockHash] = []
        root = root_hash(self._key, adapter=request.adapter, domain=request.domain)
        extend_block_hashes(names, request.prompt, one.block_size, root)
        return DecisionRecord(
            at=one.at,
            endpoint="",
            reason="recorded",
            scores={},
            excluded={},
            prompt_tokens=len(request.prompt),
            block_size=one.block_size,
            names=join_hashes(names),
            output_tokens=one.num_output,
            predicted_tokens=0,
            expected_ms=0.0,
            cached_tokens=one.cached_tokens,
            first_token=one.first_token,
            finish=now,
        )
