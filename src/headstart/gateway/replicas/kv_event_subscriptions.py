"""Subscriptions to replicas' KV events, and the choice between KV event index and approximate index per replica."""

import asyncio
from collections.abc import Callable, Mapping

from headstart.core.cache.hashing import BlockHash
from headstart.gateway.kv_events.kv_event_consumer import KVEventConsumer
from headstart.gateway.replicas.replica_monitor import DEFAULT_BLOCK, MonitoredReplica
from headstart.router.index.approximate_index import ApproximateIndex
from headstart.router.index.kv_event_index import MAX_BLOCKS, KVEventIndex
from headstart.router.index.prefix_index import PrefixIndex
from headstart.router.routing_request import router_root

TIERS = 4  # further pools in events beside the accelerator's: host memory holds one to three times as much
SLACK_BLOCKS = 65_536  # a small pool may have a large further tier
MAX_INDEX_BLOCKS = 2**21  # 600 MB of handles and hashes


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

    def index_of(self, member: MonitoredReplica) -> PrefixIndex:
        """Return the index of a replica's cache; subscribe to its events at the first call."""
        address = member.address
        if address.events is None or not self._names_tokens():
            return self._guess(member)
        size = member.metrics.block_size or DEFAULT_BLOCK
        consumer = self._consumers.get(address.url)
        if consumer is None:
            kind = member.metrics.kind or "vllm"

            def reconfigured(block_size: int) -> KVEventIndex:
                index = self._make_index(member, block_size)
                if member.endpoint is not None:
                    member.endpoint.reconfigured(block_size, index)
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
            endpoint.index = self.index_of(member)
            return
        if consumer is None or endpoint is None:
            return
        if endpoint.index is consumer.index:
            if consumer.is_suspended:
                guess = consumer.index.guess
                endpoint.index = self._guess(member) if guess is None else guess
            return
        if len(consumer.index) and not consumer.is_blind and endpoint.block_size == consumer.index.block_size:
            endpoint.index = consumer.index

    def removed(self, url: str) -> None:
        """End the subscription to a replica."""
        task = self._tasks.pop(url, None)
        if task is not None:
            task.cancel()
            del self._consumers[url]

    def counts(self) -> Mapping[str, Mapping[str, int]]:
        """Return the event counters, by replica and kind of event."""
        return {url: consumer.counts for url, consumer in self._consumers.items()}

    async def close(self) -> None:
        """End all subscriptions."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _make_index(self, member: MonitoredReplica, block_size: int) -> KVEventIndex:
        def root(adapter: str | None, domain: bytes) -> BlockHash:
            return router_root(member.base_model, adapter=adapter, domain=domain)

        return KVEventIndex(block_size, root, self._guess(member), max_blocks=index_capacity(member, block_size))


def index_capacity(member: MonitoredReplica, block_size: int) -> int:
    """Return the bound of a KV event index: the blocks of the reported pool, and as many on each further tier."""
    metrics = member.metrics
    if not metrics.num_blocks:
        return MAX_BLOCKS
    num_tokens = metrics.num_blocks * (metrics.block_size or DEFAULT_BLOCK)
    return min(TIERS * (num_tokens // block_size) + SLACK_BLOCKS, MAX_INDEX_BLOCKS)
