"""PinnedPrefixes: prefixes that operators keep in the pool permanently.

A pin refers to block *hashes*, not to blocks (invariant 8 has a separate state for idle pinned blocks): a block with a
pinned hash stays until the hash is unpinned, and a pinned hash whose block is lost is computed again. Prefixes are
whole blocks, so all requests share their memory and nothing is copied. They are computed by internal requests through
the ordinary scheduler; the engine does not output them. With recurrent layers the pages of the checkpoint at a prefix's
end are pinned like its blocks.

Hashes of a public prefix contain no isolation domain; all domains share its blocks. So a change of the public prefixes
may change the hashes of prefixes that tenants have pinned, and these are then computed again.
"""

from collections.abc import Callable, Iterable, Set
from typing import NamedTuple

from headstart.core.batch import RequestStepOutput
from headstart.core.cache.block_pool import BlockListener
from headstart.core.cache.hashing import BlockHash
from headstart.core.cache.kv_cache import KVCache
from headstart.core.cache.pinned_prefix import PinnedPrefix, PrefixInfo, PrefixState, make_pinned_prefix
from headstart.core.errors import InvalidRequestError
from headstart.core.request import FinishReason, Request, SamplingParams
from headstart.core.sequence import Sequence

REQUEST_PREFIX = "prefix:"  # of the ids of internal requests that compute prefixes
MAX_ATTEMPTS = 3  # to compute a prefix whose blocks were lost before it was ready
_ONCE = SamplingParams(temperature=0.0, max_tokens=1)


class RequestBlockDemand(NamedTuple):
    """The blocks that a live request may need in all; `non_preemptible`: it must not be preempted again."""

    seq: Sequence
    num_blocks: int
    non_preemptible: bool = False


class PinnedPrefixes(BlockListener):
    """The registry of one cache; a listener of its pool.

    The engine runs the requests that `take_aborts_and_requests` returns.

    `demands` iterates over what must still fit beside the pins.
    """

    def __init__(
        self, cache: KVCache, demands: Callable[[], Iterable[RequestBlockDemand]], *, max_share: float = 0.5
    ) -> None:
        self._cache = cache
        self._pool = cache.pool
        self._max_share = max_share
        self._demands = demands
        self._prefixes: dict[str, PinnedPrefix] = {}
        self._owners: dict[BlockHash, list[PinnedPrefix]] = {}  # prefixes of every pinned hash
        self._warming: dict[str, PinnedPrefix] = {}  # by request id
        self._requests: list[Request] = []
        self._aborted: list[str] = []
        self._num_requests = 0
        self._lost = False  # a pinned hash may have lost its block
        self._pool.listeners.append(self)
        self._pool.page_listeners.append(self)

    @property
    def max_blocks(self) -> int:
        """Upper bound of pinned hashes."""
        return int(self._pool.usable_capacity * self._max_share)

    @property
    def block_hashes(self) -> Set[BlockHash]:
        """All pinned hashes."""
        return self._owners.keys()

    @property
    def has_pending_requests(self) -> bool:
        """Whether the engine has to run prefix requests: something is warming, was lost, or must be aborted."""
        return bool(self._warming or self._lost or self._aborted)

    def add(self, name: str, token_ids: Iterable[int], *, tenant: str = "", domain: bytes = b"") -> PrefixInfo:
        """Pin the whole blocks of `token_ids` and request their computation; a failed prefix may be added again.

        Raises InvalidRequestError (prefix_exists, prefix_too_large) and changes nothing.
        """
        if not self._cache.enabled:
            raise InvalidRequestError("prefix caching is off, so nothing can be pinned; serve with it on")
        known = self._prefixes.get(name)
        if known is not None and known.is_pinned:
            message = f"there is a prefix {name!r} already; remove it first, or choose another name"
            raise InvalidRequestError(message, param="name", code="prefix_exists")
        prefix = make_pinned_prefix(name, token_ids, self._cache.block_size, tenant, domain)
        kept = [other for other in self._prefixes.values() if other.name != name]
        self._settle([*kept, prefix], prefix)
        self._prefixes[name] = prefix
        return prefix.snapshot()

    def remove(self, name: str) -> bool:
        """Unpin a prefix: its blocks become ordinary cache; return False if there is none of that name.

        Raises InvalidRequestError if tenants' prefixes that build on it would then exceed the cap on their own.
        """
        gone = self._prefixes.get(name)
        if gone is None:
            return False
        self._settle([prefix for prefix in self._prefixes.values() if prefix is not gone], gone)
        del self._prefixes[name]
        return True

    def get_prefix(self, name: str) -> PrefixInfo | None:
        """Return one prefix, or None. Changes nothing."""
        prefix = self._prefixes.get(name)
        return None if prefix is None else prefix.snapshot()

    def list_prefixes(self) -> "list[PrefixInfo]":
        """Return all prefixes, oldest first. Changes nothing."""
        return [prefix.snapshot() for prefix in self._prefixes.values()]

    # ------------------------------------------------------------------------------------------ called by the scheduler

    def is_warming_request(self, request_id: str) -> bool:
        """Return whether the request computes a prefix; such requests count neither hits nor tokens."""
        return request_id in self._warming

    def on_admitted(self, seq: Sequence) -> None:
        """Count a request at its first admission, with the pinned tokens that it reuses.

        They count for the shortest prefix that contains all these blocks, so that savings add up.
        """
        if not seq.num_pinned_tokens or seq.request_id in self._warming:
            return
        last = -(-seq.num_pinned_tokens // self._cache.block_size) - 1
        prefix = min(self._owners[seq.block_hashes[last]], key=lambda owner: len(owner.block_hashes))
        prefix.hits += 1
        prefix.tokens_saved += seq.num_pinned_tokens
        prefix.last_used = self._pool.now

    # ----------------------------------------------------------------------------------------------- called by the pool

    def on_block_removed(self, block_hash: BlockHash) -> None:
        """Note that a pinned hash has lost its block, for example because it was corrupt."""
        if block_hash in self._owners:
            self._lost = True

    def on_cache_cleared(self) -> None:
        """Note that pinned hashes may have lost their blocks."""
        self._lost = bool(self._owners)

    # --------------------------------------------------------------------------------------------- called by the engine

    def take_aborts_and_requests(self) -> "tuple[list[str], list[Request]]":
        """Return ids to abort and requests to run, so that every pinned hash gets its block. Each is returned once."""
        if self._lost:
            self._lost = False
            for prefix in self._prefixes.values():
                if prefix.state is PrefixState.READY and not self._is_computed(prefix):
                    prefix.num_attempts = 0
                    self._warm(prefix)
        aborted, self._aborted = self._aborted, []
        wanted, self._requests = self._requests, []
        return aborted, wanted

    def consume_warming_outputs(self, outputs: "list[RequestStepOutput]") -> "list[RequestStepOutput]":
        """Remove the outputs of its own requests from `outputs`."""
        if not self._warming:
            return outputs
        others: list[RequestStepOutput] = []
        for output in outputs:
            prefix = self._warming.get(output.request_id)
            if prefix is None:
                others.append(output)
            elif output.finish_reason is not None:
                self._finish(prefix, output)
        return others

    def mark_failed(self, request_id: str, error: str) -> None:
        """Fail a prefix whose request cannot be run; it stays listed and holds no blocks."""
        self._give_up(self._warming[request_id], error)

    # ---------------------------------------------------------------------------------------------------------- private

    def _settle(self, prefixes: "list[PinnedPrefix]", cause: PinnedPrefix) -> None:
        """Make these the prefixes and update their hashes; otherwise raise InvalidRequestError and change nothing."""
        before = self._cache.public_hashes
        chains = self._chains_of(prefixes)
        try:
            self._check(chains, cause)
        except InvalidRequestError:
            self._cache.public_hashes = before
            raise
        stale = [prefix for prefix in self._prefixes.values() if chains.get(prefix) != prefix.block_hashes]
        fresh = [prefix for prefix in chains if chains[prefix] != prefix.block_hashes]
        for prefix in fresh:
            if prefix.is_pinned:
                self._pool.pin_hashes(chains[prefix])  # before anything is unpinned: hashes in both sets stay pinned
        for prefix in stale:
            self._drop(prefix)
        for prefix in fresh:
            prefix.block_hashes = chains[prefix]
            if prefix.is_pinned:
                for block_hash in prefix.block_hashes:
                    self._owners.setdefault(block_hash, []).append(prefix)
                prefix.num_attempts = 0
                self._warm(prefix)

    def _chains_of(self, prefixes: "list[PinnedPrefix]") -> "dict[PinnedPrefix, list[BlockHash]]":
        """Return the block hashes of every prefix, given this set; sets the cache's public hashes accordingly."""
        public = [prefix for prefix in prefixes if not prefix.domain]
        chains = {prefix: prefix.block_hashes or self._hashes_of(prefix) for prefix in public}
        self._cache.public_hashes = {block_hash for chain in chains.values() for block_hash in chain}
        return {prefix: chains.get(prefix) or self._hashes_of(prefix) for prefix in prefixes}

    def _hashes_of(self, prefix: PinnedPrefix) -> "list[BlockHash]":
        request = Request("", prefix.token_ids, _ONCE, domain=prefix.domain, tenant=prefix.tenant)
        block_hashes = self._cache.new_sequence(request, 0).block_hashes
        return block_hashes + self._cache.checkpoints.page_hashes_of_checkpoint(block_hashes[-1])

    def _check(self, chains: "dict[PinnedPrefix, list[BlockHash]]", cause: PinnedPrefix) -> None:
        """Raise InvalidRequestError if the pins exceed the cap, or leave too little for live requests."""
        pinned = {block_hash for prefix, chain in chains.items() if prefix.is_pinned for block_hash in chain}
        if pinned <= self._owners.keys():
            return
        usable, most = self._pool.usable_capacity, self.max_blocks
        change = f"{'adding' if cause in chains else 'removing'} prefix {cause.name!r}"
        if len(pinned) > most:
            raise InvalidRequestError(
                f"{change} makes {len(pinned)} pinned blocks; of the pool's {usable} at most {most} may be pinned "
                f"(max_pinned_share {self._max_share:g}): pin less, remove other prefixes, or raise --max-pinned-share",
                code="prefix_too_large",
            )
        blocked = self._blocked(pinned)
        if blocked is not None:
            raise InvalidRequestError(
                f"{change} makes {len(pinned)} pinned blocks of {usable}, and request {blocked}, which is in flight, "
                f"could no longer be finished; try again when it is done",
                code="prefix_too_large",
            )

    def _blocked(self, pinned: Set[BlockHash]) -> str | None:
        """Return the id of a live request that would not fit beside these pins even alone, or as guaranteed to it."""
        left, reserved = self._pool.usable_capacity - len(pinned), 0
        for seq, num_blocks, non_preemptible in self._demands():
            block_hashes = seq.block_hashes if self._cache.may_read_cache(seq) and not non_preemptible else ()
            own = next(
                (index for index, block_hash in enumerate(block_hashes) if block_hash not in pinned), len(block_hashes)
            )
            reserved += num_blocks if non_preemptible else 0
            if max(num_blocks - own, reserved) > left:
                return seq.request_id
        return None

    def _drop(self, prefix: PinnedPrefix) -> None:
        """Unpin the blocks of the prefix and abort its computation."""
        if prefix.request_id:
            del self._warming[prefix.request_id]
            self._aborted.append(prefix.request_id)
            self._requests = [request for request in self._requests if request.request_id != prefix.request_id]
            prefix.request_id = ""
        if not prefix.is_pinned or not prefix.block_hashes:
            return
        self._pool.unpin_hashes(prefix.block_hashes)
        for block_hash in prefix.block_hashes:
            owners = self._owners[block_hash]
            owners.remove(prefix)
            if not owners:
                del self._owners[block_hash]

    def _warm(self, prefix: PinnedPrefix) -> None:
        """Request the computation of a prefix, under a new request id."""
        self._num_requests += 1
        prefix.num_attempts += 1
        prefix.state = PrefixState.WARMING
        prefix.request_id = f"{REQUEST_PREFIX}{prefix.name}:{self._num_requests}"
        self._warming[prefix.request_id] = prefix
        states = self._cache.checkpoints.num_pages > 0
        token_ids = prefix.token_ids + prefix.token_ids[:states]  # one is computed behind the checkpoint at its end
        self._requests.append(Request(prefix.request_id, token_ids, _ONCE, domain=prefix.domain, tenant=prefix.tenant))

    def _finish(self, prefix: PinnedPrefix, output: RequestStepOutput) -> None:
        if output.finish_reason is FinishReason.ERROR:
            self._give_up(prefix, output.error or "it could not be computed")
            return
        del self._warming[prefix.request_id]
        prefix.request_id = ""
        if self._is_computed(prefix):
            prefix.state = PrefixState.READY
        elif prefix.num_attempts < MAX_ATTEMPTS:
            self._warm(prefix)
        else:
            why = (
                "rows that failed, or no room for its state"
                if self._cache.checkpoints.num_pages
                else "rows that failed"
            )
            self._give_up(prefix, f"its blocks were lost {MAX_ATTEMPTS} times, to {why}")

    def _give_up(self, prefix: PinnedPrefix, error: str) -> None:
        if prefix.request_id:
            del self._warming[prefix.request_id]
            prefix.request_id = ""
        self._drop(prefix)
        prefix.state, prefix.error = PrefixState.FAILED, error

    def _is_computed(self, prefix: PinnedPrefix) -> bool:
        return all(map(self._pool.contains, prefix.block_hashes))
