"""ApproximateIndexes: the indexes of replicas without KV events, limited in blocks by an IndexBudget.

An approximate index takes up to 16 bytes per empty block and 130 per used one, in Python 35 and 370. Replicas report
their numbers of blocks, which may be wrong: the blocks granted to one replica are not available to others.
"""

from functools import partial

from headstart.gateway.replicas.replica_monitor import MonitoredReplica
from headstart.http.logs import Log
from headstart.router.index.approximate_index import MAX_UNKNOWN_BLOCKS, ApproximateIndex
from headstart.router.index.modelled_pool import MakePool, ModelledPool

MAX_TOTAL_BLOCKS = 2**24  # of all replicas: 2.2 GB when full, 0.3 GB when empty
MAX_REPLICA_BLOCKS = 2**22  # of one replica: 67 million tokens in blocks of 16
MIN_BLOCKS = 16_384  # granted to every replica, whatever their number


class ApproximateIndexes:
    """A maker of approximate indexes, on pools of `make_pool`.

    `at_pick`: prompts count as cached when they are routed, else when answered.
    """

    def __init__(self, log: Log, *, at_pick: bool = True, make_pool: MakePool = ModelledPool) -> None:
        self._at_pick, self._make_pool = at_pick, make_pool
        self._budget = IndexBudget(log)

    def make(self, member: MonitoredReplica) -> ApproximateIndex:
        """Return an empty index of a replica's cache, of the size and with the eviction policy that it reports."""
        metrics, url = member.metrics, member.address.url
        policy = "2q" if metrics.kind == "headstart" else "lru"
        num_blocks = self._budget.grant(url, member.cache_size[1])
        allow = partial(self._budget.grow, url)
        return ApproximateIndex(
            num_blocks, eviction_policy=policy, at_pick=self._at_pick, allow=allow, make_pool=self._make_pool
        )

    def removed(self, url: str) -> None:
        """Release the blocks of a removed replica."""
        self._budget.release(url)


class IndexBudget:
    """The blocks granted to replicas, by name."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._granted: dict[str, int] = {}
        self._clamped: set[str] = set()

    def grant(self, name: str, asked: int) -> int:
        """Return the granted blocks of the `asked` ones; replaces the last grant of that name. 0: unknown size."""
        self._granted.pop(name, None)
        left = max(MAX_TOTAL_BLOCKS - sum(self._granted.values()), MIN_BLOCKS)
        granted = min(asked, left, MAX_REPLICA_BLOCKS)
        if not asked and left < MAX_UNKNOWN_BLOCKS:
            granted = left
        self._granted[name] = granted or MAX_UNKNOWN_BLOCKS
        if granted >= asked:
            self._clamped.discard(name)
        elif name not in self._clamped:
            self._clamped.add(name)
            self._log.line(
                f"headstart: {name} reports {asked} blocks; its index gets {granted}: "
                f"one replica may have {MAX_REPLICA_BLOCKS}, all together {MAX_TOTAL_BLOCKS}"
            )
        return granted

    def grow(self, name: str, held: int, asked: int) -> int:
        """Return the blocks of an index that was granted `held` and whose replica has proven to have `asked`.

        At most half of the remaining budget goes to one replica: one with false numbers leaves blocks for later ones.
        An index with another grant is an old one and does not grow.
        """
        if self._granted.get(name) != held:
            return held
        left = max(MAX_TOTAL_BLOCKS - sum(self._granted.values()), 0)
        self._granted[name] = max(min(asked, held + left // 2, MAX_REPLICA_BLOCKS), held)
        return self._granted[name]

    def release(self, name: str) -> None:
        """Release the grant of a removed replica."""
        self._granted.pop(name, None)
        self._clamped.discard(name)
