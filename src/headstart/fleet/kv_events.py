"""KVEventConsumer: listens to the KV events of one replica (ZMQ, vLLM's format) and keeps what the router knows true.

All on the event loop's thread. A SUB socket hears the batches; a DEALER asks the replay socket, if there is one, for
those that were missed: everything when we come, what lies in a gap, and, once it is quiet, what may have been lost at
the end. Without replay a gap, or a connection that was lost, empties the index: it may know less than the engine has
then, never more. Long batches are taken in piece by piece, and requests are routed in between.
"""

import asyncio
import sys
import time
from collections.abc import Callable

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from headstart.core.events import AllBlocksCleared, BlockStored, Event
from headstart.fleet.address import ReplicaAddress
from headstart.fleet.kv_event_decoding import EventDecoder
from headstart.fleet.kv_event_sockets import END_OF_REPLAY, Replay, prepare, receive
from headstart.router.feed import Due, Feed
from headstart.router.told import NOT_USED, ToldContents

POLL_SECONDS = 0.5  # the longest time in which nothing is looked after
QUIET_SECONDS = 1.0  # after the last live batch, before the replay is asked whether it was the last
CHECK_SECONDS = 15.0  # after which it is asked in any case: whoever loses batches may lose all
REPLAY_SECONDS = 5.0  # without a message of a replay, after which it is thought not to come
RETRY_SECONDS = 5.0  # after a socket could not be made
SLICE_SECONDS = 0.002  # of taking in events, then others have their turn
MAX_ROUND = 1_000  # messages of one socket, then the other one is looked at

Reconfigured = Callable[[int], ToldContents]


class KVEventConsumer:
    """Told contents that are kept true while `run` runs. `kind`: "vllm", "sglang" or "headstart" (EventDecoder).

    `reconfigured` is told the block size where an empty replica turns out to have another one than its contents, and
    gives the contents to go on with; without it such events are counted and left out.
    """

    def __init__(
        self, address: ReplicaAddress, contents: ToldContents, *, kind: str, reconfigured: Reconfigured | None = None
    ) -> None:
        assert address.events is not None, f"{address.url} publishes no events"
        self.address = address
        self._contents = contents
        self.is_connected = False
        self.last_heard: float | None = None  # of a batch, live or replayed; seconds, time.monotonic()
        self._reconfigured = reconfigured
        self._decoder = EventDecoder(kind)
        self._feed = Feed(replays=address.replay is not None)
        self._replay: Replay | None = None
        self._past = dict.fromkeys(contents.counts, 0)  # of contents that were replaced
        self._own = dict.fromkeys(("heard", "batches", "voids", "connections", "replays"), 0)
        self._stirred_at: float | None = None  # the last live batch or connection, if the replay was not asked since
        self._was_blind = False
        self._num_swaps = 0  # contents that others put in place
        self._turn = 0.0  # when others had theirs; seconds, time.perf_counter()

    @property
    def contents(self) -> ToldContents:
        """What is kept true. Others may be put in their place: they are filled anew if there is a replay socket."""
        return self._contents

    @contents.setter
    def contents(self, contents: ToldContents) -> None:
        self._replace(contents)
        self._num_swaps += 1
        self._feed.reset()
        self._decoder.cleared()
        self._stirred_at = time.monotonic()

    @property
    def counts(self) -> dict[str, int]:
        """Counters for metrics: they only grow.

        `heard`: live batches; `batches`: those that were taken in, live or replayed; `lost`: those that were given up;
        `undecodable`: those that nobody could read. `voids`: times that all had to be forgotten. `unknown_parents`,
        `unknown_copies`, `other_block_size`, `other_groups`, `unknown_events`, `malformed`: events that were left out.
        """
        told = {key: value + self._past[key] for key, value in self.contents.counts.items()}
        feed = {"gaps": self._feed.num_gaps, "lost": self._feed.num_lost, "restarts": self._feed.num_restarts}
        return {**self._own, **feed, **self._decoder.counts, **told}

    @property
    def position(self) -> int:
        """The number of the batch that is next in order."""
        return self._feed.position

    @property
    def is_missing(self) -> bool:
        """Whether batches wait behind a gap."""
        return self._feed.replay_from is not None

    @property
    def is_blind(self) -> bool:
        """Whether requests end there and nothing of use is heard of them."""
        return self.contents.is_blind

    async def run(self) -> None:
        """Listens until it is cancelled. Where nobody is, or is no more, it tries again and again."""
        context = zmq.asyncio.Context()
        try:
            while True:
                try:
                    await self._listen(context)
                except zmq.ZMQError as error:
                    self._say(f"cannot listen at {self.address.events} ({error})")
                await self._take(self._feed.reset())
                await asyncio.sleep(RETRY_SECONDS)
        finally:
            self.is_connected = False
            context.destroy(linger=0)

    # ------------------------------------------------------------------------------------------------------ sockets

    async def _listen(self, context: zmq.asyncio.Context) -> None:
        """Hears, asks and looks after what is missing until a socket fails. Raises ZMQError."""
        assert self.address.events is not None
        sub = context.socket(zmq.SUB)
        monitor = sub.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._replay = None if self.address.replay is None else Replay(context, self.address.replay)
        prepare(sub)
        sub.setsockopt(zmq.SUBSCRIBE, b"")
        sub.connect(self.address.events)
        try:
            while True:
                poller = zmq.asyncio.Poller()
                for sock in (sub, monitor, *([self._replay.socket] if self._replay is not None else [])):
                    poller.register(sock, zmq.POLLIN)
                await poller.poll(round(POLL_SECONDS * 1000))
                await self._connections(monitor)
                await self._hear(sub)
                if self._replay is not None:
                    await self._hear_replay(self._replay)
                await self._look_after()
        finally:
            self.is_connected = False
            sub.disable_monitor()
            sub.close(linger=0)
            if self._replay is not None:
                self._replay.close()

    async def _connections(self, monitor: zmq.asyncio.Socket) -> None:
        """Notes who comes and goes. Behind a new connection there may be a new publisher, and batches were missed."""
        while (frames := await receive(monitor)) is not None:
            if parse_monitor_message(frames)["event"] != zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.is_connected = False
                continue
            self.is_connected = True
            self._own["connections"] += 1
            if self._replay is not None:
                self._ask(self._replay)
                self._stirred_at = time.monotonic()  # what is published before it knows of us is not sent to us
            elif self._own["connections"] > 1:
                await self._take(self._feed.reset())

    async def _hear(self, sub: zmq.asyncio.Socket) -> None:
        for _ in range(MAX_ROUND):
            frames = await receive(sub)
            if frames is None:
                return
            self._own["heard"] += 1
            self._stirred_at = time.monotonic()
            await self._offer(frames, replayed=False)

    async def _hear_replay(self, replay: Replay) -> None:
        for _ in range(MAX_ROUND):
            frames = await receive(replay.socket)
            if frames is None:
                return
            replay.heard_at = time.monotonic()
            if len(frames) > 1 and frames[-2] == END_OF_REPLAY:
                await self._replay_ended(replay)
            else:
                replay.brought_something = replay.is_of_use = True
                await self._offer(frames, replayed=True)

    async def _offer(self, frames: list[bytes], *, replayed: bool) -> None:
        """One message: whatever stands before it, the last two frames are number and batch."""
        if len(frames) < 2 or len(frames[-2]) != 8:
            self._decoder.counts["undecodable"] += 1
            return
        self.last_heard = time.monotonic()
        await self._take(self._feed.offer(int.from_bytes(frames[-2], "big"), frames[-1], replayed=replayed))

    # ------------------------------------------------------------------------------------------------ what is missing

    async def _look_after(self) -> None:
        """Asks for what is missing, gives up what does not come, and says when nothing of use does."""
        now, replay = time.monotonic(), self._replay
        if replay is None:
            await self._give_up()
        elif replay.is_under_way:
            if now - replay.heard_at > REPLAY_SECONDS:
                await self._replay_ended(replay, in_time=False)
        else:
            is_quiet = self._stirred_at is not None and now - self._stirred_at > QUIET_SECONDS
            if is_quiet or self.is_missing or now - replay.heard_at > CHECK_SECONDS:
                self._ask(replay)
        if self.is_blind and not self._was_blind:
            self._say(f"{self.contents.silence} requests ended and nothing of use was heard: {self._cause()}")
        self._was_blind = self.is_blind

    def _ask(self, replay: Replay) -> None:
        """Asks for all from the last batch that was taken on: that one shows whether the publisher is the same."""
        self._own["replays"] += 1
        self._stirred_at = None
        replay.ask(max(self._feed.position - 1, 0), (self._feed.num_restarts, self._feed.position))

    async def _replay_ended(self, replay: Replay, *, in_time: bool = True) -> None:
        """Gives up what it did not bring, unless it brought some: publishers cut long replays, so we ask again."""
        restarts, position = replay.end(in_time)
        if in_time and position and not replay.brought_something and replay.is_of_use:
            await self._take(self._feed.restarted())  # not even the batch that was taken last, and that is asked for
        is_another = restarts != self._feed.num_restarts
        if is_another or (position != self._feed.position and (self.is_missing or not in_time)):
            self._ask(replay)
        else:
            await self._give_up()

    async def _give_up(self) -> None:
        """Goes on behind all gaps there are: whatever could fill one has come."""
        while self.is_missing:
            await self._take(self._feed.give_up())

    # ------------------------------------------------------------------------------------------------------- contents

    async def _take(self, due: Due) -> None:
        """Takes in what is due, and lets others have their turn now and then."""
        if due.void:
            self._own["voids"] += 1
            self.contents.clear()
            self._decoder.cleared()
        swaps = self._num_swaps
        for payload in due.batches:
            self._own["batches"] += 1
            for event in self._decoder.decode(payload):
                self._adapt(event)
                self.contents.apply((event,))
                if time.perf_counter() - self._turn > SLICE_SECONDS:
                    await asyncio.sleep(0)
                    self._turn = time.perf_counter()
                    if swaps != self._num_swaps:
                        return  # what was under way belongs to the contents before

    def _adapt(self, event: Event) -> None:
        """Goes on with contents of another block size where the replica has one and nothing is known of it yet."""
        if isinstance(event, AllBlocksCleared):
            self._decoder.cleared()
        size = event.block_size if isinstance(event, BlockStored) and event.parent_block_hash is None else 0
        if self._reconfigured is None or size in (0, self.contents.block_size) or len(self.contents):
            return
        self._say(f"its blocks have {size} tokens, not {self.contents.block_size}")
        self._replace(self._reconfigured(size))

    def _replace(self, contents: ToldContents) -> None:
        for key, value in self._contents.counts.items():
            self._past[key] += value
        self._contents = contents

    def _cause(self) -> str:
        """The likeliest reason why nothing is of use, and what to do."""
        counts, where = self.counts, self.address.events
        worst = max(NOT_USED, key=lambda key: counts[key])
        if not self.is_connected:
            return f"nobody is at {where}; are events enabled there (--kv-events-config), and is it the right port?"
        if not counts["batches"]:
            return (
                f"not one batch came from {where}; is enable_kv_cache_events on, and does its endpoint bind the port?"
            )
        if counts["stored"]:
            return "what others computed is told, what these requests computed is not"
        if counts["undecodable"] or counts["malformed"]:
            return f"{counts['undecodable']} batches and {counts['malformed']} events cannot be read; another topic?"
        if counts["other_groups"] or not counts[worst]:
            return "there are no events of layers that keep the whole prefix"
        if worst == "other_block_size":
            return f"its blocks are not of {self.contents.block_size} tokens, which is what the router takes them for"
        remedy = "name its replay endpoint, too" if self.address.replay is None else "let it keep more (buffer_steps)"
        return f"events hang on blocks that were stored before we came, or that we missed; {remedy}"

    def _say(self, text: str) -> None:
        print(f"headstart: KV events of {self.address.url}: {text}", file=sys.stderr, flush=True)
