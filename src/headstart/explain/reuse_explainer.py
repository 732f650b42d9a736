"""explain: why a prompt was taken over from the cache so far and no further, by what is known of recent requests.

Changes nothing, and costs some milliseconds when someone asks. Whoever asks sees tokens and ids of requests of the own
tenant only, an administrator those of all; of other tenants one learns at most that one of them evicted a block.
"""

from array import array
from dataclasses import asdict, dataclass
from enum import Enum
from typing import NamedTuple

from headstart.core.batch import PromptTokenBreakdown
from headstart.core.cache.history import Evicted
from headstart.core.cache.pinned_prefixes import REQUEST_PREFIX
from headstart.core.request import CacheMode, Request, Sequence
from headstart.core.sched.scheduler import Scheduler
from headstart.explain.recent_requests import RecentRequests, Seen

WINDOW = 40  # tokens on either side of a divergence: enough for as many characters
_ITEM = array("i").itemsize


class Reason(Enum):
    """Why reuse stopped where it did."""

    COMPLETE = "complete"  # everything was there; the last token is always computed, for its logits
    TAIL = "tail"  # what is left does not fill a block, and blocks are shared whole
    DISABLED = "disabled"  # the engine runs without prefix caching
    BYPASS = "bypass"  # the request's own cache mode
    UNREAD = "prompt_logprobs"  # log-probabilities of the prompt have to be computed
    EVICTED = "evicted"
    COMPUTING = "computing"  # another request has the same tokens and was not through with them
    DIVERGED = "diverged"  # the nearest recent request goes on with another token
    EXTENDS = "extends"  # the nearest recent request ends there
    ISOLATED = "isolated"  # the same tokens are there, but in another isolation domain or for another adapter
    NOT_KEPT = "not_kept"  # a recent request had the same tokens and leaves nothing behind: read-only or bypass
    GONE = "gone"  # a recent request had the same tokens; what became of its blocks is no longer known
    UNSEEN = "never_seen"  # no recent request begins with the same block


class Viewer(NamedTuple):
    """Who asks."""

    tenant: str = ""
    is_admin: bool = False

    def may_see(self, seq: Sequence) -> bool:
        """Whether that request may be told of."""
        return self.is_admin or seq.request.tenant == self.tenant


class NearMatch(NamedTuple):
    """A recent request with the same first tokens, and what lies around the place where they part."""

    request_id: str
    common_tokens: int
    before: tuple[int, ...]  # the last of the common ones
    this: tuple[int, ...]  # how the prompt in question goes on
    other: tuple[int, ...]  # how the other one does; empty: it ends there


class Eviction(NamedTuple):
    """How the first missing block was lost."""

    cause: str  # "capacity", "failed", "reset"
    by: str | None  # id of the request that took its place; None: nobody, another tenant's, or no longer known
    by_another_tenant: bool
    seconds_ago: float


@dataclass(frozen=True, slots=True)
class Explanation:
    """Answer to "why was no more of it cached?"; counts in tokens.

    For a request of the past `position` and `reason` are those of its first admission, else what a prompt like that
    would meet now.
    """

    request_id: str | None
    status: str | None
    num_prompt_tokens: int
    block_size: int
    position: int  # tokens taken over before the first that had to be computed
    reason: Reason
    now: PromptTokenBreakdown  # what a prompt like that would find now
    then: PromptTokenBreakdown | None = None  # what it came from; None: not computed yet, or never asked for
    near: NearMatch | None = None
    eviction: Eviction | None = None

    def as_dict(self) -> dict[str, object]:
        """Plain values only."""
        plain: dict[str, object] = {**asdict(self), "reason": self.reason.value}
        for name, value in (("now", self.now), ("then", self.then), ("near", self.near), ("eviction", self.eviction)):
            plain[name] = None if value is None else value._asdict()
        return plain


def explain_request(
    scheduler: Scheduler, recent: RecentRequests, request_id: str, viewer: Viewer, now: float
) -> Explanation | None:
    """Explains a recent request; None if it is not known, or not the viewer's to see. `now` in seconds."""
    seen = recent.find(request_id)
    waiting = seen is None and next((seq for seq in scheduler.waiting if seq.request_id == request_id), None)
    seq = seen.seq if seen is not None else waiting
    if not seq or not viewer.may_see(seq):
        return None
    fresh = scheduler.cache.new_sequence(seq.request, 0)
    found = _found_now(scheduler, fresh)
    if seen is None:
        return _Case(scheduler, recent, fresh, found.cached, None, viewer, now).explanation(found, seq)
    return _Case(scheduler, recent, seq, seen.start, seen, viewer, now).explanation(found, seq)


def explain_prompt(
    scheduler: Scheduler, recent: RecentRequests, request: Request, viewer: Viewer, now: float
) -> Explanation:
    """Explains what a request would meet if it came now; it is not queued. `now` in seconds."""
    fresh = scheduler.cache.new_sequence(request, 0)
    found = _found_now(scheduler, fresh)
    return _Case(scheduler, recent, fresh, found.cached, None, viewer, now).explanation(found)


@dataclass(frozen=True, slots=True)
class _Case:
    """One question."""

    scheduler: Scheduler
    recent: RecentRequests
    seq: Sequence
    position: int
    seen: Seen | None  # of the past: the entry in question, else None
    viewer: Viewer
    now: float

    def explanation(self, found: PromptTokenBreakdown, asked: Sequence | None = None) -> Explanation:
        reason, near, eviction = self._find_reason()
        return Explanation(
            request_id=None if asked is None else asked.request_id,
            status=None if asked is None else asked.status.value,
            num_prompt_tokens=len(self._prompt),
            block_size=self._size,
            position=self.position,
            reason=reason,
            now=found,
            then=None if self.seen is None else self.seen.ledger,
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
        """Of the first block that was not taken over."""
        return self.position // self._size

    @property
    def _needed(self) -> int:
        """Tokens that another request must have in common for its blocks to have helped."""
        return (self._index + 1) * self._size

    def _find_reason(self) -> tuple[Reason, NearMatch | None, Eviction | None]:
        own = self._own_reason()
        if own is not None:
            return own, None, None
        twin = self._running_twin() if self.seen is None else None
        if twin is not None:
            return Reason.COMPUTING, self._near(twin, self._common(twin)) if self.viewer.may_see(twin) else None, None
        evicted = self._evicted()
        if evicted is not None:
            return Reason.EVICTED, None, self._eviction(evicted)
        near, common = self._nearest(isolated=False)
        if near is not None and self._would_have_helped(near, common):
            return self._reason_of_equal(near), self._near(near.seq, common), None
        other, shared = self._nearest(isolated=True)
        if other is not None and self._would_have_helped(other, shared):
            return Reason.ISOLATED, self._near(other.seq, shared), None
        if near is None or common < max(self.position, 1):
            return Reason.UNSEEN, None, None
        if common < self._size:  # what a chat template writes before every conversation is no common beginning
            return Reason.UNSEEN, self._near(near.seq, common), None
        reason = Reason.EXTENDS if common == len(near.seq.token_ids) else Reason.DIVERGED
        return reason, self._near(near.seq, common), None

    def _own_reason(self) -> Reason | None:
        """A reason that lies in the request alone."""
        request, num_tokens = self.seq.request, len(self._prompt)
        if not self.scheduler.cache.enabled:
            return Reason.DISABLED
        if request.sampling.prompt_logprobs is not None:
            return Reason.UNREAD
        if request.cache is CacheMode.BYPASS:
            return Reason.BYPASS
        if self.position >= num_tokens - 1:
            return Reason.COMPLETE
        return Reason.TAIL if self._needed > num_tokens else None

    def _running_twin(self) -> Sequence | None:
        """A running sequence that will publish the missing block."""
        scheduler, index = self.scheduler, self._index
        for seq in scheduler.running:
            names = seq.block_hashes
            if index < len(names) and names[index] == self.seq.block_hashes[index] and scheduler.cache.writes(seq):
                return seq
        return None

    def _evicted(self) -> Evicted | None:
        if self.seen is not None:
            return self.seen.evicted
        return self.scheduler.pool.eviction_of(self.seq.block_hashes[self._index])

    def _eviction(self, evicted: Evicted) -> Eviction:
        by = self.recent.find(evicted.by)
        visible = self.viewer.is_admin or (by is not None and self.viewer.may_see(by.seq))
        another = by is not None and by.seq.request.tenant != self.seq.request.tenant
        return Eviction(
            evicted.cause, evicted.by or None if visible else None, another, max(self.now - evicted.at, 0.0)
        )

    def _nearest(self, *, isolated: bool) -> "tuple[Seen | None, int]":
        """The recent request with most leading tokens in common, the newest of equals, and how many they are.

        Of those that came before, were admitted and may be seen; `isolated`: of other domains and adapters.
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
                found, best = seen, prompt[: _common(prompt, tokens) * _ITEM]
        return found, len(best) // _ITEM

    def _would_have_helped(self, near: Seen, common: int) -> bool:
        """Whether the missing block was among what it computed: all its tokens but the last one of its output."""
        return min(common, len(near.seq.token_ids) - 1) >= self._needed

    def _may_share(self, seq: Sequence) -> bool:
        """Whether blocks of that sequence can be found by the one in question."""
        own, other = self.seq.request, seq.request
        public = not other.domain and other.request_id.startswith(REQUEST_PREFIX)
        return own.adapter == other.adapter and (public or own.domain == other.domain)

    def _reason_of_equal(self, near: Seen) -> Reason:
        """Why a request of the past did not help that had every token of the missing block."""
        if not self.scheduler.cache.writes(near.seq):
            return Reason.NOT_KEPT
        begun = None if self.seen is None else self.seen.admitted
        if begun is not None and (near.answered is None or near.answered >= begun):
            return Reason.COMPUTING
        return Reason.GONE

    def _common(self, seq: Sequence) -> int:
        return _common(self._prompt.tobytes(), seq.token_ids.tobytes())

    def _near(self, seq: Sequence, common: int) -> NearMatch:
        prompt, tokens, end = self._prompt, seq.token_ids, common + WINDOW
        before = tuple(prompt[max(common - WINDOW, 0) : common])
        return NearMatch(seq.request_id, common, before, tuple(prompt[common:end]), tuple(tokens[common:end]))


def _found_now(scheduler: Scheduler, seq: Sequence) -> PromptTokenBreakdown:
    """What a new sequence would take over now."""
    hit = scheduler.cache.match(seq)
    names = seq.block_hashes[: len(hit.block_ids)]
    pinned = sum(map(scheduler.pool.is_pinned, names)) * scheduler.block_size
    pinned = min(pinned, hit.num_tokens)
    return PromptTokenBreakdown(pinned, hit.num_tokens - pinned, computed=len(seq.token_ids) - hit.num_tokens)


def _common(prompt: bytes, tokens: bytes) -> int:
    """Leading tokens that two packed lists have in common."""
    low, high = 0, min(len(prompt), len(tokens)) // _ITEM
    while low < high:
        middle = (low + high + 1) // 2
        if prompt[low * _ITEM : middle * _ITEM] == tokens[low * _ITEM : middle * _ITEM]:
            low = middle
        else:
            high = middle - 1
    return low
