"""Listening: which replicas the router is told of by KV events, and what it believes of the others (precise mode)."""

import asyncio
from collections.abc import Callable, Mapping

from headstart.core.cache.hashing import BlockHash
from headstart.gateway.kv_events.kv_event_consumer import KVEventConsumer
from headstart.gateway.replicas.replica_monitor import DEFAULT_BLOCK, MonitoredReplica
from headstart.router.index.kv_event_index import MAX_BLOCKS, KVEventIndex
from headstart.router.index.prefix_index import PrefixIndex
from headstart.router.routing_request import router_root

TIERS = 4  # pools that engines tell of beside the accelerator's: host memory holds one to three times as much
SLACK_BLOCKS = 65_536  # a small pool may have a large tier beside it
MAX_TOLD_BLOCKS = 2**21  # 600 MB of handles and names


class KVEventSubscriptions:
    """Consumers of KV events, one for each replica whose address names where they are published.

    `guess` gives the contents of replicas that are not listened to. Events hold token ids: as long as `names_tokens`
    says that prompts are not counted in tokens, nothing in them could be found, and it is guessed.
    """

    def __init__(
        self, guess: Callable[[MonitoredReplica], PrefixIndex], names_tokens: Callable[[], bool] = lambda: True
    ) -> None:
        self._guess = guess
        self._names_tokens = names_tokens
        self._consumers: dict[str, KVEventConsumer] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def contents(self, member: MonitoredReplica) -> PrefixIndex:
        """What is believed of a replica's cache; begins to listen to it if it is the first time."""
        address = member.address
        if address.events is None or not self._names_tokens():
            return self._guess(member)
        size = member.metrics.block_size or DEFAULT_BLOCK
        consumer = self._consumers.get(address.url)
        if consumer is None:
            kind = member.metrics.kind or "vllm"

            def reconfigured(block_size: int) -> KVEventIndex:
                told = self._told(member, block_size)
                if member.endpoint is not None:
                    member.endpoint.reconfigured(block_size, told)
                return told

            consumer = KVEventConsumer(address, self._told(member, size), kind=kind, reconfigured=reconfigured)
            self._consumers[address.url] = consumer
            self._tasks[address.url] = asyncio.create_task(consumer.run())
        elif consumer.contents.block_size != size:
            consumer.contents = self._told(member, size)
        return self._guess(member) if consumer.is_suspended else consumer.contents

    def looked_at(self, member: MonitoredReplica) -> None:
        """Listens again where that was given up, once something of use is heard; and where it can begin only now.

        While a publisher is suspended the cache of its replica is guessed.
        """
        consumer, endpoint = self._consumers.get(member.address.url), member.endpoint
        if consumer is None and endpoint is not None and member.address.events is not None and self._names_tokens():
            endpoint.contents = self.contents(member)
            return
        if consumer is None or endpoint is None:
            return
        if endpoint.contents is consumer.contents:
            if consumer.is_suspended:
                endpoint.contents = consumer.contents.guess or self._guess(member)
            return
        if len(consumer.contents) and not consumer.is_blind and endpoint.block_size == consumer.contents.block_size:
            endpoint.contents = consumer.contents

    def removed(self, url: str) -> None:
        """Listens to it no more."""
        task = self._tasks.pop(url, None)
        if task is not None:
            task.cancel()
            del self._consumers[url]

    def counts(self) -> Mapping[str, Mapping[str, int]]:
        """What was heard, by replica and kind of event."""
        return {url: consumer.counts for url, consumer in self._consumers.items()}

    async def close(self) -> None:
        """Stops listening."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _told(self, member: MonitoredReplica, block_size: int) -> KVEventIndex:
        def root(adapter: str | None, domain: bytes) -> BlockHash:
            return router_root(member.base_model, adapter=adapter, domain=domain)

        return KVEventIndex(block_size, root, self._guess(member), max_blocks=told_capacity(member, block_size))


def told_capacity(member: MonitoredReplica, block_size: int) -> int:
    """The blocks that events may tell of: those of the reported pool, and as many again on each tier beside it."""
    metrics = member.metrics
    if not metrics.num_blocks:
        return MAX_BLOCKS
    num_tokens = metrics.num_blocks * (metrics.block_size or DEFAULT_BLOCK)
    return min(TIERS * (num_tokens // block_size) + SLACK_BLOCKS, MAX_TOLD_BLOCKS)
