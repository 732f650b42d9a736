"""Reuse explainer: why reuse of a prompt stopped where it did, from the recent requests.

Changes nothing; a call takes some milliseconds. A viewer sees tokens and ids of requests of its own tenant only, an
administrator those of all; of other tenants it learns at most that one of them evicted a block.
"""

from array import array
from dataclasses import asdict, dataclass
from enum import Enum
from typing import NamedTuple

from headstart.common_prefix import common_prefix_length
from headstart.core.batch import PromptTokenBreakdown
from headstart.core.cache.history import EvictionRecord
from headstart.core.cache.pinned_prefixes import REQUEST_PREFIX
from headstart.core.recent_requests import AdmittedRequest, RecentRequests
from headstart.core.request import CacheMode, Request
from headstart.core.sched.scheduler import Scheduler
from headstart.core.sequence import Sequence

WINDOW = 40  # tokens shown on either side of a divergence: enough for as many characters
_ITEM = array("i").itemsize
MAX_TOKENS = 32 * 1024  # of each prompt behind the divergence


class ReuseEndReason(Enum):
    """The cause of the end of reuse."""

    COMPLETE = "complete"  # everything was cached; the last token is always computed, for its logits
    TAIL = "tail"  # the remaining tokens do not fill a block, and only whole blocks are shared
    DISABLED = "disabled"  # the engine runs without prefix caching
    BYPASS = "bypass"  # the request's own cache mode
    UNREAD = "prompt_logprobs"  # log-probabilities of the prompt have to be computed
    NO_CHECKPOINT = "no_checkpoint"  # keys and values are there, but no recurrent state behind them
    EVICTED = "evicted"
    COMPUTING = "computing"  # another request with the same tokens had not computed them yet
    DIVERGED = "diverged"  # the nearest recent request continues with another token
    EXTENDS = "extends"  # the nearest recent request ends there
    ISOLATED = "isolated"  # the same tokens are cached, but in another isolation domain or for another adapter
    NOT_KEPT = "not_kept"  # a recent request had the same tokens and published nothing: read-only or bypass
    GONE = "gone"  # a recent request had the same tokens; the record of its blocks' eviction is gone
    UNSEEN = "never_seen"  # no recent request begins with the same block


class Viewer(NamedTuple):
    """The tenant of the caller, and whether it is an administrator."""

    tenant: str = ""
    is_admin: bool = False

    def may_see(self, seq: Sequence) -> bool:
        """Return whether the viewer may see that request."""
        return self.is_admin or seq.request.tenant == self.tenant


class NearMatch(NamedTuple):
    """A recent request with the same first tokens, and the tokens around the point of divergence."""

    request_id: str
    common_tokens: int
    before: tuple[int, ...]  # the last common ones
    this: tuple[int, ...]  # continuation of the explained prompt
    other: tuple[int, ...]  # continuation of the other prompt; empty: it ends there
    repeated_tokens: int = 0  # tokens behind the divergence that both have, at any offset


class ExplainedEviction(NamedTuple):
    """The eviction of the first missing block."""

    cause: str  # "capacity", "failed", "reset"
    by: str | None  # id of the request that needed the space; None: no request, or another tenant's
    by_another_tenant: bool
    by_tenant: str | None  # None: as `by`, or a request without a tenant
    seconds_ago: float


@dataclass(frozen=True, slots=True)
class Explanation:
    """The explanation of one prompt's reuse; counts in tokens.

    For a past request `position` and `reason` are those of its first admission; otherwise those of a prompt sent now.
    """

    request_id: str | None
    status: str | None
    num_prompt_tokens: int
    block_size: int
    position: int  # reused tokens before the first that had to be computed
    reason: ReuseEndReason
    now: PromptTokenBreakdown  # for the same prompt, sent now
    then: PromptTokenBreakdown | None = None  # of the past request; None: not computed yet, or there is none
    near: NearMatch | None = None
    eviction: ExplainedEviction | None = None

    def as_dict(self) -> dict[str, object]:
        """Return plain values only."""
        plain: dict[str, object] = {**asdict(self), "reason": self.reason.value}
        for name, value in (("now", self.now), ("then", self.then), ("near", self.near), ("eviction", self.eviction)):
            plain[name] = None if value is None else value._asdict()
        return plain


def explain_request_reuse(
    scheduler: Scheduler, recent: RecentRequests, request_id: str, viewer: Viewer, now: float
) -> Explanation | None:
    """Explain a recent request; None if it is unknown, or hidden from the viewer. `now` in seconds."""
    seen = recent.find(request_id)
    waiting = seen is None and next((seq for seq in scheduler.waiting if seq.request_id == request_id), None)
    seq = seen.seq if seen is not None else waiting
    if not seq or not viewer.may_see(seq):
        return None
    fresh = scheduler.cache.new_sequence(seq.request, 0)
    found = _found_now(scheduler, fresh)
    if seen is None:
        return _Case(scheduler, recent, fresh, found.num_cached, None, viewer, now).explanation(found, seq)
    return _Case(scheduler, recent, seq, seen.start, seen, viewer, now).explanation(found, seq)


def explain_prompt_reuse(
    scheduler: Scheduler, recent: RecentRequests, request: Request, viewer: Viewer, now: float
) -> Explanation:
    """Explain the reuse of a request if it came now; it is not queued. `now` in seconds."""
    fresh = scheduler.cache.new_sequence(request, 0)
    found = _found_now(scheduler, fresh)
    return _Case(scheduler, recent, fresh, found.num_cached, None, viewer, now).explanation(found)


@dataclass(frozen=True, slots=True)
class _Case:
    """One prompt to be explained."""

    scheduler: Scheduler
    recent: RecentRequests
    seq: Sequence
    position: int
    seen: AdmittedRequest | None  # the entry of a past request, else None
    viewer: Viewer
    now: float

    def explanation(self, found: PromptTokenBreakdown, explained: Sequence | None = None) -> Explanation:
        reason, near, eviction = self._find_reason()
        return Explanation(
            request_id=None if explained is None else explained.request_id,
            status=None if explained is None else explained.status.value,
            num_prompt_tokens=len(self._prompt),
            block_size=self._size,
            position=self.position,
            reason=reason,
            now=found,
            then=None if self.seen is None else self.seen.breakdown,
            near=near,
            eviction=eviction,
        )

    @property
    def _prompt(self) -> "array[int]":
        return self.seq.request.prompt

    @property
    def _size(self) -> int:
        return self.scheduler.block_size

    @property
    def _index(self) -> int:
        """Index of the first block that was not reused."""
        return self.position // self._size

    @property
    def _needed(self) -> int:
        """Tokens that another request must have in common for its blocks to be of use."""
        return (self._index + 1) * self._size

    def _find_reason(self) -> tuple[ReuseEndReason, NearMatch | None, ExplainedEviction | None]:
        own = self._own_reason()
        if own is not None:
            return own, None, None
        twin = self._running_twin() if self.seen is None else None
        if twin is not None:
            return (
                ReuseEndReason.COMPUTING,
                self._near(twin, self._common(twin)) if self.viewer.may_see(twin) else None,
                None,
            )
        evicted = self._evicted()
        if evicted is not None:
            return ReuseEndReason.EVICTED, None, self._eviction(evicted)
        near, common = self._nearest(isolated=False)
        if near is not None and self._would_have_helped(near, common):
            return self._reason_of_equal(near), self._near(near.seq, common), None
        other, shared = self._nearest(isolated=True)
        if other is not None and self._would_have_helped(other, shared):
            return ReuseEndReason.ISOLATED, self._near(other.seq, shared), None
        if near is None or common < max(self.position, 1):
            return ReuseEndReason.UNSEEN, None, None
        if common < self._size:  # the text a chat template writes before every conversation does not count
            return ReuseEndReason.UNSEEN, self._near(near.seq, common), None
        reason = ReuseEndReason.EXTENDS if common == len(near.seq.token_ids) else ReuseEndReason.DIVERGED
        return reason, self._near(near.seq, common), None

    def _own_reason(self) -> ReuseEndReason | None:
        """Return a reason that lies in the request alone."""
        request, num_tokens = self.seq.request, len(self._prompt)
        if not self.scheduler.cache.enabled:
            return ReuseEndReason.DISABLED
        if request.sampling.prompt_logprobs is not None:
            return ReuseEndReason.UNREAD
        if request.cache is CacheMode.BYPASS:
            return ReuseEndReason.BYPASS
        if self.position >= num_tokens - 1:
            return ReuseEndReason.COMPLETE
        if self._needed > num_tokens:
            return ReuseEndReason.TAIL
        return ReuseEndReason.NO_CHECKPOINT if self._has_kv() else None

    def _has_kv(self) -> bool:
        """Return whether the keys and values of the first block that was not reused are, or were then, in the pool."""
        if self.seen is not None:
            return self.seen.has_kv
        cache = self.scheduler.cache
        return cache.checkpoints.num_pages > 0 and len(cache.match_prefix(self.seq).block_ids) > self._index

    def _running_twin(self) -> Sequence | None:
        """Return a running sequence that will publish the missing block."""
        scheduler, index = self.scheduler, self._index
        for seq in scheduler.running:
            block_hashes = seq.block_hashes
            if (
                index < len(block_hashes)
                and block_hashes[index] == self.seq.block_hashes[index]
                and scheduler.cache.may_publish(seq)
            ):
                return seq
        return None

    def _evicted(self) -> EvictionRecord | None:
        if self.seen is not None:
            return self.seen.evicted
        return self.scheduler.pool.find_eviction_record(self.seq.block_hashes[self._index])

    def _eviction(self, evicted: EvictionRecord) -> ExplainedEviction:
        another = bool(evicted.by) and evicted.tenant != self.seq.request.tenant
        is_visible = bool(evicted.by) and (self.viewer.is_admin or evicted.tenant == self.viewer.tenant)
        by, tenant = (evicted.by, evicted.tenant or None) if is_visible else (None, None)
        return ExplainedEviction(evicted.cause, by, another, tenant, max(self.now - evicted.at, 0.0))

    def _nearest(self, *, isolated: bool) -> "tuple[AdmittedRequest | None, int]":
        """Return the recent request with most leading tokens in common, the newest of equals, and their number.

        Only requests that were admitted earlier and are visible count; `isolated`: only those of other domains and
        adapters.
        """
        prompt = self._prompt.tobytes()
        found, best = None, b""
        for seen in self.recent:
            if self.seen is not None and seen.order >= self.seen.order:
                continue
            if self._may_share(seen.seq) is isolated or not self.viewer.may_see(seen.seq):
                continue
            tokens = seen.seq.token_ids.tobytes()
            if tokens.startswith(prompt[: len(best) + _ITEM]) and len(best) < len(prompt):
                found, best = seen, prompt[: common_prefix_length(prompt, tokens) // _ITEM * _ITEM]
        return found, len(best) // _ITEM

    def _would_have_helped(self, near: AdmittedRequest, common: int) -> bool:
        """Return whether it computed the missing block: all its tokens but the last one of its output."""
        return min(common, len(near.seq.token_ids) - 1) >= self._needed

    def _may_share(self, seq: Sequence) -> bool:
        """Return whether the explained sequence can find blocks of that sequence."""
        own, other = self.seq.request, seq.request
        public = not other.domain and other.request_id.startswith(REQUEST_PREFIX)
        return own.adapter == other.adapter and (public or own.domain == other.domain)

    def _reason_of_equal(self, near: AdmittedRequest) -> ReuseEndReason:
        """Return why a past request with every token of the missing block was of no use."""
        if not self.scheduler.cache.may_publish(near.seq):
            return ReuseEndReason.NOT_KEPT
        begun = None if self.seen is None else self.seen.admitted
        if begun is not None and (near.first_token_step is None or near.first_token_step >= begun):
            return ReuseEndReason.COMPUTING
        return ReuseEndReason.GONE

    def _common(self, seq: Sequence) -> int:
        return common_prefix_length(self._prompt, seq.token_ids)

    def _near(self, seq: Sequence, common: int) -> NearMatch:
        prompt, tokens, end = self._prompt, seq.token_ids, common + WINDOW
        before = tuple(prompt[max(common - WINDOW, 0) : common])
        this, other = tuple(prompt[common:end]), tuple(tokens[common:end])
        repeated = num_repeated_after_divergence(prompt, tokens, common, self._size) if this and other else 0
        return NearMatch(seq.request_id, common, before, this, other, repeated)


def _found_now(scheduler: Scheduler, seq: Sequence) -> PromptTokenBreakdown:
    """Return the breakdown of a new sequence if it were admitted now."""
    hit = scheduler.cache.match_prefix(seq)
    block_hashes = seq.block_hashes[: len(hit.block_ids)]
    pinned = sum(map(scheduler.pool.is_pinned, block_hashes)) * scheduler.block_size
    pinned = min(pinned, hit.num_tokens)
    return PromptTokenBreakdown(pinned, hit.num_tokens - pinned, computed=len(seq.token_ids) - hit.num_tokens)


def num_repeated_after_divergence(this: "array[int]", other: "array[int]", start: int, size: int) -> int:
    """Return the number of tokens of `this` from `start` on that stand in `other` behind `start`, in runs of `size`.

    Runs are looked for in order of `this`; one of `other` may be found more than once.
    """
    own, found = _packed(this, start), _packed(other, start)
    width = size * _ITEM
    places = {found[at : at + width]: at for at in range(len(found) - width, -1, -_ITEM)}  # the first place of each
    count = at = 0
    while at + width <= len(own):
        place = places.get(own[at : at + width])
        if place is None:
            at += _ITEM
            continue
        length = _common(own, at, found, place)
        count += length // _ITEM
        at += length
    return count


def _packed(tokens: "array[int]", start: int) -> bytes:
    return tokens[start : start + MAX_TOKENS].tobytes()


def _common(own: bytes, at: int, found: bytes, place: int) -> int:
    """Return the number of equal bytes, a multiple of a token's, from `at` and `place` on."""
    low, high = 0, min(len(own) - at, len(found) - place) // _ITEM
    while low < high:
        middle = (low + high + 1) // 2
        start, end = low * _ITEM, middle * _ITEM
        if own[at + start : at + end] == found[place + start : place + end]:
            low = middle
        else:
            high = middle - 1
    return low * _ITEM
