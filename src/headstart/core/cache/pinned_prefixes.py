"""PinnedPrefixes: prefixes that operators keep in the pool for good.

A pin holds *names*, not blocks (law 8: an idle pinned block is a state of its own): whatever block carries a pinned
name stays until the name is unpinned, and a name whose content is gone is computed again. Prefixes are whole blocks, so
all requests share their memory and nothing is copied. They are computed by ordinary requests through the ordinary
scheduler, which the engine keeps to itself.

A public prefix is anybody's: its names are the border in front of which isolation domains share blocks. So a change of
the public ones may rename what tenants have pinned, and then that is computed anew.
"""

from collections.abc import Callable, Iterable, Set
from typing import NamedTuple

from headstart.core.batch import Output
from headstart.core.cache.hashing import BlockHash
from headstart.core.cache.kv_cache import KVCache
from headstart.core.cache.pinned_prefix import Prefix, PrefixInfo, PrefixState, new_prefix
from headstart.core.errors import InvalidRequestError
from headstart.core.request import FinishReason, Request, SamplingParams, Sequence

REQUEST_PREFIX = "prefix:"  # of the ids of the requests that compute prefixes
MAX_ATTEMPTS = 3  # to compute one whose blocks were lost before it was ready
_ONCE = SamplingParams(temperature=0.0, max_tokens=1)


class Demand(NamedTuple):
    """Blocks that a live request may come to need in all; `stays`: it was promised not to give way again."""

    seq: Sequence
    num_blocks: int
    stays: bool = False


class PinnedPrefixes:
    """The registry over one cache; a listener of its pool. The engine runs the requests that `take_requests` gives.

    `demands` tells what must still fit beside the pins.
    """

    def __init__(self, cache: KVCache, demands: Callable[[], Iterable[Demand]], *, max_share: float = 0.5) -> None:
        self._cache = cache
        self._pool = cache.pool
        self._max_share = max_share
        self._demands = demands
        self._prefixes: dict[str, Prefix] = {}
        self._owners: dict[BlockHash, list[Prefix]] = {}  # of every pinned name
        self._warming: dict[str, Prefix] = {}  # by request id
        self._requests: list[Request] = []
        self._aborted: list[str] = []
        self._num_requests = 0
        self._lost = False  # a pinned name may have lost its block
        self._pool.listeners.append(self)

    @property
    def max_blocks(self) -> int:
        """Names that may be pinned in all."""
        return int(self._pool.num_usable * self._max_share)

    @property
    def names(self) -> Set[BlockHash]:
        """All that is pinned."""
        return self._owners.keys()

    @property
    def is_active(self) -> bool:
        """Whether the engine has to tend prefixes: something is warming, was lost, or is to be aborted."""
        return bool(self._warming or self._lost or self._aborted)

    def add(self, name: str, token_ids: Iterable[int], *, tenant: str = "", domain: bytes = b"") -> PrefixInfo:
        """Pins the whole blocks of `token_ids` and asks for their computation; one that failed may be added again.

        Raises InvalidRequestError (prefix_exists, prefix_too_large), and nothing has changed.
        """
        if not self._cache.enabled:
            raise InvalidRequestError("prefix caching is off, so nothing can be pinned; serve with it on")
        known = self._prefixes.get(name)
        if known is not None and known.is_pinned:
            message = f"there is a prefix {name!r} already; remove it first, or choose another name"
            raise InvalidRequestError(message, param="name", code="prefix_exists")
        prefix = new_prefix(name, token_ids, self._cache.block_size, tenant, domain)
        kept = [other for other in self._prefixes.values() if other.name != name]
        self._settle([*kept, prefix], prefix)
        self._prefixes[name] = prefix
        return prefix.info()

    def remove(self, name: str) -> bool:
        """Unpins a prefix: its blocks become ordinary cache; False if there is none of that name.

        Raises InvalidRequestError if tenants' prefixes that build on it would then exceed the cap on their own.
        """
        gone = self._prefixes.get(name)
        if gone is None:
            return False
        self._settle([prefix for prefix in self._prefixes.values() if prefix is not gone], gone)
        del self._prefixes[name]
        return True

    def get(self, name: str) -> PrefixInfo | None:
        """One prefix, or None. Changes nothing."""
        prefix = self._prefixes.get(name)
        return None if prefix is None else prefix.info()

    def list(self) -> "list[PrefixInfo]":
        """All of them, oldest first. Changes nothing."""
        return [prefix.info() for prefix in self._prefixes.values()]

    # ------------------------------------------------------------------------------------------ what the scheduler says

    def is_warming(self, request_id: str) -> bool:
        """Whether the request is one of ours: nobody's hit, and nobody's tokens."""
        return request_id in self._warming

    def admitted(self, seq: Sequence) -> None:
        """Counts a request at its first admission, with the pinned tokens that it took over.

        They count for the shortest prefix that all these blocks belong to, so that savings add up.
        """
        if not seq.num_pinned_tokens or seq.request_id in self._warming:
            return
        last = -(-seq.num_pinned_tokens // self._cache.block_size) - 1
        prefix = min(self._owners[seq.block_hashes[last]], key=lambda owner: len(owner.names))
        prefix.hits += 1
        prefix.tokens_saved += seq.num_pinned_tokens
        prefix.last_used = self._pool.now

    # ----------------------------------------------------------------------------------------------- what the pool says

    def published(self, block: int, name: BlockHash, parent: BlockHash, tokens: bytes) -> None:
        """Nothing to do: who computed a pinned name does not matter."""

    def removed(self, name: BlockHash) -> None:
        """Notes that a pinned name has lost its block, as one that is corrupt does."""
        if name in self._owners:
            self._lost = True

    def cleared(self) -> None:
        """Notes that pinned names may have lost their blocks."""
        self._lost = bool(self._owners)

    # --------------------------------------------------------------------------------------------- what the engine does

    def take_requests(self) -> "tuple[list[str], list[Request]]":
        """Ids to abort, and then requests to run, so that every pinned name gets its block. Each is given once."""
        if self._lost:
            self._lost = False
            for prefix in self._prefixes.values():
                if prefix.state is PrefixState.READY and not self._is_computed(prefix):
                    prefix.num_attempts = 0
                    self._warm(prefix)
        aborted, self._aborted = self._aborted, []
        wanted, self._requests = self._requests, []
        return aborted, wanted

    def sift(self, outputs: "list[Output]") -> "list[Output]":
        """Takes the news of its own requests out of `outputs`."""
        if not self._warming:
            return outputs
        others: list[Output] = []
        for output in outputs:
            prefix = self._warming.get(output.request_id)
            if prefix is None:
                others.append(output)
            elif output.finish_reason is not None:
                self._finish(prefix, output)
        return others

    def fail(self, request_id: str, error: str) -> None:
        """Gives a prefix up whose request cannot be run; it stays listed, and holds no blocks."""
        self._give_up(self._warming[request_id], error)

    # ---------------------------------------------------------------------------------------------------------- private

    def _settle(self, prefixes: "list[Prefix]", cause: Prefix) -> None:
        """Makes these the prefixes, names and all; or raises InvalidRequestError and changes nothing."""
        before = self._cache.public_names
        chains = self._named(prefixes)
        try:
            self._check(chains, cause)
        except InvalidRequestError:
            self._cache.public_names = before
            raise
        stale = [prefix for prefix in self._prefixes.values() if chains.get(prefix) != prefix.names]
        fresh = [prefix for prefix in chains if chains[prefix] != prefix.names]
        for prefix in fresh:
            if prefix.is_pinned:
                self._pool.pin(chains[prefix])  # before anything is unpinned: what both hold stays
        for prefix in stale:
            self._drop(prefix)
        for prefix in fresh:
            prefix.names = chains[prefix]
            if prefix.is_pinned:
                self._own(prefix)
                prefix.num_attempts = 0
                self._warm(prefix)

    def _named(self, prefixes: "list[Prefix]") -> "dict[Prefix, list[BlockHash]]":
        """Every prefix with the names it gets if there are these; leaves the cache with their public names."""
        public = [prefix for prefix in prefixes if not prefix.domain]
        chains = {prefix: prefix.names or self._names_of(prefix) for prefix in public}
        self._cache.public_names = {name for chain in chains.values() for name in chain}
        return {prefix: chains.get(prefix) or self._names_of(prefix) for prefix in prefixes}

    def _names_of(self, prefix: Prefix) -> "list[BlockHash]":
        request = Request("", prefix.token_ids, _ONCE, domain=prefix.domain, tenant=prefix.tenant)
        return self._cache.new_sequence(request, 0).block_hashes

    def _check(self, chains: "dict[Prefix, list[BlockHash]]", cause: Prefix) -> None:
        """Raises InvalidRequestError for more than may be pinned, or more than live requests can spare."""
        pinned = {name for prefix, chain in chains.items() if prefix.is_pinned for name in chain}
        if pinned <= self._owners.keys():
            return
        usable, most = self._pool.num_usable, self.max_blocks
        change = f"{'adding' if cause in chains else 'removing'} prefix {cause.name!r}"
        if len(pinned) > most:
            raise InvalidRequestError(
                f"{change} makes {len(pinned)} pinned blocks; of the pool's {usable} at most {most} may be pinned "
                f"(max_pinned_share {self._max_share:g}): pin less, remove other prefixes, or raise --max-pinned-share",
                code="prefix_too_large",
            )
        hindered = self._hindered(pinned)
        if hindered is not None:
            raise InvalidRequestError(
                f"{change} makes {len(pinned)} pinned blocks of {usable}, and request {hindered}, which is under way, "
                f"could no longer be finished; try again when it is done",
                code="prefix_too_large",
            )

    def _hindered(self, pinned: Set[BlockHash]) -> str | None:
        """Id of a live request that would not find room beside these names even alone, or as was promised to it."""
        room, stay = self._pool.num_usable - len(pinned), 0
        for seq, num_blocks, stays in self._demands():
            names = seq.block_hashes if self._cache.reads(seq) and not stays else ()
            own = next((index for index, name in enumerate(names) if name not in pinned), len(names))
            stay += num_blocks if stays else 0
            if max(num_blocks - own, stay) > room:
                return seq.request_id
        return None

    def _own(self, prefix: Prefix) -> None:
        for name in prefix.names:
            self._owners.setdefault(name, []).append(prefix)

    def _drop(self, prefix: Prefix) -> None:
        """Unpins what the prefix holds, and gives up computing it."""
        if prefix.request_id:
            del self._warming[prefix.request_id]
            self._aborted.append(prefix.request_id)
            self._requests = [request for request in self._requests if request.request_id != prefix.request_id]
            prefix.request_id = ""
        if not prefix.is_pinned or not prefix.names:
            return
        self._pool.unpin(prefix.names)
        for name in prefix.names:
            owners = self._owners[name]
            owners.remove(prefix)
            if not owners:
                del self._owners[name]

    def _warm(self, prefix: Prefix) -> None:
        """Asks for the computation of a prefix, under an id that was never used before."""
        self._num_requests += 1
        prefix.num_attempts += 1
        prefix.state = PrefixState.WARMING
        prefix.request_id = f"{REQUEST_PREFIX}{prefix.name}:{self._num_requests}"
        self._warming[prefix.request_id] = prefix
        self._requests.append(
            Request(prefix.request_id, prefix.token_ids, _ONCE, domain=prefix.domain, tenant=prefix.tenant)
        )

    def _finish(self, prefix: Prefix, output: Output) -> None:
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
            self._give_up(prefix, f"its blocks were lost {MAX_ATTEMPTS} times, to rows that failed")

    def _give_up(self, prefix: Prefix, error: str) -> None:
        if prefix.request_id:
            del self._warming[prefix.request_id]
            prefix.request_id = ""
        self._drop(prefix)
        prefix.state, prefix.error = PrefixState.FAILED, error

    def _is_computed(self, prefix: Prefix) -> bool:
        return all(map(self._pool.contains, prefix.names))
