"""Subscriptions to replicas' KV events, and the choice between KV event index and approximate index per replica.

ApproximateIndexFactory: the indexes of replicas without KV events, limited in blocks by an IndexBlockBudget.

An approximate index takes up to 16 bytes per empty block and 130 per used one, in Python 35 and 370. Replicas report
their numbers of blocks, which may be wrong: the blocks granted to one replica are not available to others.
"""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial

from headstart.core.cache.hashing import BlockHash
from headstart.gateway.kv_events.kv_event_consumer import KVEventConsumer
from headstart.gateway.replicas.replica_monitor import DEFAULT_BLOCK, MonitoredReplica
from headstart.http.logs import ServerLog
from headstart.router.index.approximate_index import MAX_UNKNOWN_BLOCKS, ApproximateIndex
from headstart.router.index.kv_event_index import MAX_BLOCKS, ReplicaKVEventIndex
from headstart.router.index.modelled_pool import MakePool, ModelledPool
from headstart.router.index.prefix_index import PrefixIndex
from headstart.router.routing_request import router_root

TIERS = 4  # further pools in events beside the accelerator's: host memory holds one to three times as much
SLACK_BLOCKS = 65_536  # a small pool may have a large further tier
MAX_INDEX_BLOCKS = 2**21  # 600 MB of handles and hashes
MAX_TOTAL_BLOCKS = 2**24  # of all replicas: 2.2 GB when full, 0.3 GB when empty
MAX_REPLICA_BLOCKS = 2**22  # of one replica: 67 million tokens in blocks of 16
MIN_BLOCKS = 16_384  # granted to every replica, whatever their number


class KVEventSubscriptions:
    """Consumers of KV events, one for each replica whose address includes an events endpoint.

    `guess` returns the index of replicas without a consumer. Events hold token ids: while `names_tokens` reports that
    prompts are not counted in tokens, lookups could not match them, and the cache is approximated.
    """

    def __init__(
        self, guess: Callable[[MonitoredReplica], ApproximateIndex], names_tokens: Callable[[], bool] = lambda: True
    ) -> None:
        self._guess = guess
        self._names_tokens = names_tokens
        self._consumers: dict[str, KVEventConsumer] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def open_replica_index(self, member: MonitoredReplica) -> PrefixIndex:
        """Return the index of a replica's cache; subscribe to its events at the first call."""
        address = member.address
        if address.events is None or not self._names_tokens():
            return self._guess(member)
        size = member.metrics.block_size or DEFAULT_BLOCK
        consumer = self._consumers.get(address.url)
        if consumer is None:
            kind = member.metrics.kind or "vllm"

            def reconfigured(block_size: int) -> ReplicaKVEventIndex:
                index = self._make_index(member, block_size)
                if member.endpoint is not None:
                    member.endpoint.reset_for_block_size(block_size, index)
                return index

            consumer = KVEventConsumer(address, self._make_index(member, size), kind=kind, reconfigured=reconfigured)
            self._consumers[address.url] = consumer
            self._tasks[address.url] = asyncio.create_task(consumer.run())
        elif consumer.index.block_size != size:
            consumer.index = self._make_index(member, size)
        return self._guess(member) if consumer.is_suspended else consumer.index

    def on_probe(self, member: MonitoredReplica) -> None:
        """Return to the KV event index once it holds usable events; subscribe if that is possible only now.

        While a publisher is suspended, its replica has an approximate index.
        """
        consumer, endpoint = self._consumers.get(member.address.url), member.endpoint
        if consumer is None and endpoint is not None and member.address.events is not None and self._names_tokens():
            endpoint.index = self.open_replica_index(member)
            return
        if consumer is None or endpoint is None:
            return
        if endpoint.index is consumer.index:
            if consumer.is_suspended:
                guess = consumer.index.guess
                endpoint.index = self._guess(member) if guess is None else guess
            return
        if (
            len(consumer.index)
            and not consumer.lacks_usable_events
            and endpoint.block_size == consumer.index.block_size
        ):
            endpoint.index = consumer.index

    def on_replica_removing(self, url: str) -> None:
        """End the subscription to a replica."""
        task = self._tasks.pop(url, None)
        if task is not None:
            task.cancel()
            del self._consumers[url]

    def event_counts(self) -> Mapping[str, Mapping[str, int]]:
        """Return the event counters, by replica and kind of event."""
        return {url: consumer.counts for url, consumer in self._consumers.items()}

    async def close(self) -> None:
        """End all subscriptions."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _make_index(self, member: MonitoredReplica, block_size: int) -> ReplicaKVEventIndex:
        def root(adapter: str | None, domain: bytes) -> BlockHash:
            return router_root(member.base_model, adapter=adapter, domain=domain)

        return ReplicaKVEventIndex(block_size, root, self._guess(member), max_blocks=index_capacity(member, block_size))


def index_capacity(member: MonitoredReplica, block_size: int) -> int:
    """Return the bound of a KV event index: the blocks of the reported pool, and as many on each further tier."""
    metrics = member.metrics
    if not metrics.num_blocks:
        return MAX_BLOCKS
    num_tokens = metrics.num_blocks * (metrics.block_size or DEFAULT_BLOCK)
    return min(TIERS * (num_tokens // block_size) + SLACK_BLOCKS, MAX_INDEX_BLOCKS)


class ApproximateIndexFactory:
    """A maker of approximate indexes, on pools of `make_pool`.

    `at_pick`: prompts count as cached when they are routed, else when answered.
    """

    def __init__(self, log: ServerLog, *, at_pick: bool = True, make_pool: MakePool = ModelledPool) -> None:
        self._at_pick, self._make_pool = at_pick, make_pool
        self._budget = IndexBlockBudget(log)

    def make(self, member: MonitoredReplica) -> ApproximateIndex:
        """Return an empty index of a replica's cache, of the size and with the eviction policy that it reports."""
        metrics, url = member.metrics, member.address.url
        policy = "2q" if metrics.kind == "headstart" else "lru"
        num_blocks = self._budget.grant_blocks(url, member.modelled_block_size_and_count[1])
        allow = partial(self._budget.grow_block_grant, url)
        return ApproximateIndex(
            num_blocks, eviction_policy=policy, at_pick=self._at_pick, allow=allow, make_pool=self._make_pool
        )

    def on_replica_removing(self, url: str) -> None:
        """Release the blocks of a removed replica."""
        self._budget.release(url)


class IndexBlockBudget:
    """The blocks granted to replicas, by name."""

    def __init__(self, log: ServerLog) -> None:
        self._log = log
        self._granted: dict[str, int] = {}
        self._clamped: set[str] = set()

    def grant_blocks(self, name: str, asked: int) -> int:
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
            self._log.write_line(
                f"headstart: {name} reports {asked} blocks; its index gets {granted}: "
                f"one replica may have {MAX_REPLICA_BLOCKS}, all together {MAX_TOTAL_BLOCKS}"
            )
        return granted

    def grow_block_grant(self, name: str, held: int, asked: int) -> int:
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
