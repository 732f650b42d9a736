"""A real engine without a model, its KV events over real sockets, a relay that drops some, and a consumer of them.

For the experiment and the invariant tests of precise mode: after any run the consumer's index is compared with the
engine's own.
"""

import asyncio
import threading
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

import zmq

from headstart.core.cache.events import Event
from headstart.core.cache.hashing import root_hash
from headstart.core.engine import Engine
from headstart.core.request import Request, SamplingParams
from headstart.core.sched.limits import Limits
from headstart.core.sched.scheduler import Scheduler
from headstart.core.sched.scheduler_config import SchedulerConfig
from headstart.engine.kv_event_encoding import KVEventEncoder
from headstart.engine.kv_event_publisher import KVEventPublisher, KVEventsConfig
from headstart.gateway.kv_events.kv_event_consumer import KVEventConsumer
from headstart.gateway.kv_events.kv_event_decoding import domain_of_cache_salt
from headstart.gateway.replicas.replica_address import ReplicaAddress
from headstart.measurement.inprocess import run_requests
from headstart.openai.engine_requests import salted_domain
from headstart.router.index.kv_event_index import ReplicaKVEventIndex
from headstart_lab.runners.null_executor import NullExecutor

VOCAB_SIZE = 500
SALTS = (None, "amber", "birch")
ADAPTERS = (None, "poet")
STEP_SECONDS = 0.01  # polling interval while waiting for the consumer


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the engine's pool, its blocks in tokens, and the prompts: shared prefixes and suffixes."""

    num_blocks: int = 96
    block_size: int = 4
    groups: int = 6
    prefix: int = 40
    suffix: int = 40
    requests: int = 8  # at once


class Difference(NamedTuple):
    """Block counts: in the engine's index, in the router's; missing from the router's; only in the router's."""

    engine: int
    router: int
    missing: int
    wrong: int


class Relay:
    """A relay that forwards batches from one address to another and drops a share of them, in its own thread."""

    def __init__(self, source: str, target: str, rng: Random) -> None:
        self.loss = 0.0
        self.num_lost = 0
        self.last_number = -1  # of the batch that was forwarded or dropped last
        self._rng = rng
        self._ends = threading.Event()
        self._context = zmq.Context()
        self._sub, self._pub = self._context.socket(zmq.SUB), self._context.socket(zmq.PUB)
        for sock in (self._sub, self._pub):
            sock.set_hwm(0)
        self._sub.setsockopt(zmq.SUBSCRIBE, b"")
        self._sub.connect(source)
        self._pub.bind(target)
        self._thread = threading.Thread(target=self._run, name="lossy relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ends.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        while not self._ends.is_set():
            if not self._sub.poll(20):
                continue
            frames = self._sub.recv_multipart()
            if self._rng.random() < self.loss:
                self.num_lost += 1
            else:
                self._pub.send_multipart(frames)
            self.last_number = int.from_bytes(frames[-2], "big")


class Rig:
    """Engine, publisher, relay if `relayed`, and consumer.

    `replay`: with replay, without, or from another address. `folder`: a short path for the sockets; `buffer_steps`:
    batches kept for replay.
    """

    def __init__(
        self,
        folder: str,
        sizes: Sizes,
        seed: int,
        *,
        replay: bool | str = True,
        relayed: bool = True,
        buffer_steps: int = 10_000,
    ) -> None:
        self.sizes = sizes
        self.rng = Random(seed)
        self.num_published = 0  # batches of the current publisher
        own = f"ipc://{folder}/replay"
        self._config = KVEventsConfig(endpoint=f"ipc://{folder}/events", replay_endpoint=own, buffer_steps=buffer_steps)
        self.relay = Relay(self._config.endpoint, f"ipc://{folder}/relay", Random(seed + 1)) if relayed else None
        heard_at = f"ipc://{folder}/relay" if relayed else self._config.endpoint
        self.address = ReplicaAddress("http://replica", heard_at, (own if replay is True else replay) or None)
        self.consumer = self.listener()
        self._count = 0
        self._prefixes = [self._tokens(sizes.prefix) for _ in range(sizes.groups)]
        self._domains = {domain_of_cache_salt(salt): salted_domain(b"", salt) for salt in SALTS}
        self._start(sizes.block_size)

    def listener(self) -> KVEventConsumer:
        """Return a consumer of these events with the same block hashes as the engine."""
        return KVEventConsumer(
            self.address, self._contents(self.sizes.block_size), kind="headstart", reconfigured=self._contents
        )

    def restart(self, block_size: int | None = None) -> None:
        """Start another engine and another publisher at the same addresses."""
        self._publisher.close()
        self._start(block_size or self.engine.scheduler.block_size)

    def close(self) -> None:
        self._publisher.close()
        if self.relay is not None:
            self.relay.close()

    async def serve(self, rounds: int = 1) -> None:
        """Serve `rounds` batches of requests, outside the event loop."""
        for _ in range(rounds):
            requests = [self._request() for _ in range(self.sizes.requests)]
            await asyncio.to_thread(run_requests, self.engine, requests)

    def payloads(self, rounds: int) -> list[bytes]:
        """Return the payloads published while serving `rounds` batches of requests, one payload per event batch."""
        encoder, found = KVEventEncoder("CPU"), list[bytes]()
        self._heard = lambda events: found.append(encoder.encode(1.5, events))
        for _ in range(rounds):
            run_requests(self.engine, [self._request() for _ in range(self.sizes.requests)])
        return found

    async def warm_up(self) -> None:
        """Serve until the consumer receives live batches: a publisher does not wait for its subscribers."""
        while not self.consumer.counts["heard"]:
            await self.serve()
            await asyncio.sleep(STEP_SECONDS)

    async def caught_up(self, consumer: KVEventConsumer | None = None) -> None:
        """Wait until the consumer has applied the last published batch."""
        consumer = consumer or self.consumer
        await self.until(
            lambda: (
                consumer.next_batch_number == self.num_published
                and not (consumer.has_gap or consumer.has_batch_in_progress)
            )
        )

    async def settled(self) -> None:
        """Wait until no published batch is on its way to subscribers, of the present or of the future."""
        relay = self.relay
        assert relay is not None, "only a relay shows what was sent"
        await self.until(lambda: relay.last_number == self.num_published - 1)

    async def until_heard(self) -> None:
        """Serve until the consumer has received the last batch and misses none before it; at least once.

        A consumer that was reset and a publisher that has just started are both at batch 0, before the subscription has
        reached the publisher.
        """
        is_behind = True
        while is_behind:
            await self.serve()
            await asyncio.sleep(5 * STEP_SECONDS)
            consumer = self.consumer
            is_behind = (
                consumer.next_batch_number != self.num_published or consumer.has_gap or consumer.has_batch_in_progress
            )

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(STEP_SECONDS)

    def difference(self, consumer: KVEventConsumer | None = None) -> Difference:
        """Return the difference between the consumer's index and the engine's own, by block hash."""
        pool, index = self.engine.scheduler.pool, (consumer or self.consumer).index
        wrong = sum(not pool.contains(block_hash) for block_hash in index)
        return Difference(pool.num_published, len(index), pool.num_published - (len(index) - wrong), wrong)

    def _start(self, block_size: int) -> None:
        limits = Limits(max_batched_tokens=2048, max_seqs=4, max_model_len=self.sizes.prefix + self.sizes.suffix + 16)
        num_blocks = self.sizes.num_blocks * self.sizes.block_size // block_size
        self.num_published = 0
        self._publisher = KVEventPublisher(self._config, medium="CPU")
        self._heard = self._publisher.publish
        executor = NullExecutor(num_blocks, block_size, VOCAB_SIZE)
        self.engine = Engine(
            Scheduler(
                SchedulerConfig(num_blocks, block_size, limits, policy="fcfs", eviction_policy="lru", tenant_floor=0.0)
            ),
            executor,
            event_sink=self._publish,
        )

    def _publish(self, events: list[Event]) -> None:
        self.num_published += 1
        self._heard(events)

    def _contents(self, block_size: int) -> ReplicaKVEventIndex:
        """Return an empty index with the engine's block hashes: the rig maps each domain digest to its domain."""

        def root(adapter: str | None, domain: bytes):
            return root_hash(b"", adapter=adapter, domain=self._domains[domain])

        return ReplicaKVEventIndex(block_size, root)

    def _request(self) -> Request:
        self._count += 1
        prefix = self.rng.choice(self._prefixes)[: self.rng.randrange(self.sizes.prefix + 1)]
        prompt = prefix + self._tokens(self.rng.randrange(1, self.sizes.suffix))
        return Request(
            f"r{self._count}",
            prompt,
            SamplingParams(max_tokens=self.rng.randrange(1, 12), temperature=0.0),
            adapter=self.rng.choice(ADAPTERS),
            domain=salted_domain(b"", self.rng.choice(SALTS)),
        )

    def _tokens(self, count: int) -> "array[int]":
        return array("i", (self.rng.randrange(VOCAB_SIZE) for _ in range(count)))
