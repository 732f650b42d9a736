"""KVEventConsumer: listens to the KV events of one replica (ZMQ, vLLM's format) and keeps what the router knows true.

All on the event loop's thread. A SUB socket hears the batches; a DEALER asks the replay socket, if there is one, for
those that were missed: everything when we come, what lies in a gap, and, once it is quiet, what may have been lost at
the end. Without replay a gap, or a connection that was lost, empties the index: it may know less than the engine has
then, never more. Long batches are taken in piece by piece, and requests are routed in between (kv_event_intake.py).

A publisher whose batches cannot be read, or a listener that fails, is suspended (kv_event_trust.py): the sockets are
closed, the index is empty, the cache is guessed, and after a pause everything begins anew.
"""

import asyncio
import sys
import time
from typing import NoReturn

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from headstart.gateway.kv_events.kv_event_causes import likely_cause
from headstart.gateway.kv_events.kv_event_intake import EventIntake, Reconfigured
from headstart.gateway.kv_events.kv_event_sockets import END_OF_REPLAY, MAX_FRAMES, Replay, receive, subscribe
from headstart.gateway.kv_events.kv_event_trust import PublisherTrust, UntrustedPublisherError
from headstart.gateway.replicas.replica_address import ReplicaAddress
from headstart.http.logs import Log
from headstart.router.index.event_sequencer import Due, EventSequencer
from headstart.router.index.kv_event_index import KVEventIndex

POLL_SECONDS = 0.5  # the longest time in which nothing is looked after
QUIET_SECONDS = 1.0  # after the last live batch, before the replay is asked whether it was the last
CHECK_SECONDS = 15.0  # after which it is asked in any case: whoever loses batches may lose all
REPLAY_SECONDS = 5.0  # without a message of a replay, after which it is thought not to come
RETRY_SECONDS = 5.0  # after a socket could not be made
RENEW_SECONDS = 10.0  # without a connection, after which another socket is made
MAX_ROUND = 1_000  # messages of one socket, then the other one is looked at


class KVEventConsumer:
    """Told contents that are kept true while `run` runs. `kind`: "vllm", "sglang" or "headstart" (EventDecoder).

    `reconfigured` is told the block size where an empty replica turns out to have another one than its contents, and
    gives the contents to go on with; without it such events are counted and left out.
    """

    def __init__(
        self, address: ReplicaAddress, contents: KVEventIndex, *, kind: str, reconfigured: Reconfigured | None = None
    ) -> None:
        assert address.events is not None, f"{address.url} publishes no events"
        self.address = address
        self.is_connected = False
        self.is_suspended = False  # it is not listened to for a while
        self.last_heard: float | None = None  # of a batch, live or replayed; seconds, time.monotonic()
        self._trust = PublisherTrust()
        self._intake = EventIntake(contents, kind, self._trust, self._say, reconfigured)
        self._feed = EventSequencer(replays=address.replay is not None)
        self._replay: Replay | None = None
        self._own = dict.fromkeys(("heard", "connections", "replays", "suspensions", "failures"), 0)
        self._stirred_at: float | None = None  # the last live batch or connection, if the replay was not asked since
        self._was_blind = False

    @property
    def contents(self) -> KVEventIndex:
        """What is kept true. Others may be put in their place: they are filled anew if there is a replay socket."""
        return self._intake.contents

    @contents.setter
    def contents(self, contents: KVEventIndex) -> None:
        self._intake.swap(contents)
        self._feed.reset()
        self._stirred_at = time.monotonic()

    @property
    def counts(self) -> dict[str, int]:
        """Counters for metrics: they only grow.

        `heard`: live batches; `batches`: those that were taken in, live or replayed; `lost`: those that were given up;
        `undecodable`: those that nobody could read. `voids`: times that all had to be forgotten. `unknown_parents`,
        `unknown_copies`, `other_block_size`, `other_groups`, `unknown_events`, `malformed`: events that were left out.
        `over_capacity`: times that the index outgrew its bound. `suspensions`: times that the publisher was suspended;
        `failures`: those because the listener failed.
        """
        feed = {"gaps": self._feed.num_gaps, "lost": self._feed.num_lost, "restarts": self._feed.num_restarts}
        return {**self._own, **feed, **self._intake.counts}

    @property
    def position(self) -> int:
        """The number of the batch that is next in order."""
        return self._feed.position

    @property
    def is_taking(self) -> bool:
        """Whether batches before `position` are still being taken in; others have their turns in between."""
        return self._intake.is_taking

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
                pause = await self._attempt(context)
                self._intake.void()
                self._feed.reset()
                await asyncio.sleep(pause)
                self.is_suspended = False
        finally:
            self.is_connected = False
            context.destroy(linger=0)

    async def _attempt(self, context: zmq.asyncio.Context) -> float:
        """Listen until it fails; return the seconds to wait before the next attempt."""
        try:
            await self._listen(context)
        except zmq.ZMQError as error:
            self._say(f"cannot listen at {self.address.events} ({error})")
            return RETRY_SECONDS
        except UntrustedPublisherError as error:
            pause = self._trust.suspend(time.monotonic())
            self._say(f"{error}; its cache is guessed, and events are listened to again in {pause:.0f} s")
        except Exception as error:  # a fault of ours must not end the listener: the index would never change again
            pause = self._trust.suspend(time.monotonic())
            self._own["failures"] += 1
            Log().failure("kv_event_listener_failed", error, self.address.url)
        self.is_suspended = True
        self._own["suspensions"] += 1
        return pause

    # ------------------------------------------------------------------------------------------------------ sockets

    async def _listen(self, context: zmq.asyncio.Context) -> NoReturn:
        """Hears, asks and looks after what is missing. Raises ZMQError and UntrustedPublisherError."""
        self._replay = None if self.address.replay is None else Replay(context, self.address.replay)
        try:
            while True:
                await self._listen_while_connected(context)
        finally:
            self.is_connected = False
            if self._replay is not None:
                self._replay.close()

    async def _listen_while_connected(self, context: zmq.asyncio.Context) -> None:
        """Returns when nobody was there for a while: after an oversized message libzmq does not connect again."""
        sub, monitor = subscribe(context, self.address.events or "")
        connected_at = time.monotonic()
        try:
            while time.monotonic() - connected_at <= RENEW_SECONDS:
                poller = zmq.asyncio.Poller()
                for sock in (sub, monitor, *([self._replay.socket] if self._replay is not None else [])):
                    poller.register(sock, zmq.POLLIN)
                await poller.poll(round(POLL_SECONDS * 1000))
                await self._connections(monitor)
                await self._hear(sub)
                if self._replay is not None:
                    await self._hear_replay(self._replay)
                await self._look_after()
                if self.is_connected:
                    connected_at = time.monotonic()
        finally:
            sub.disable_monitor()
            sub.close(linger=0)

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
            if 1 < len(frames) <= MAX_FRAMES and frames[-2] == END_OF_REPLAY:
                await self._replay_ended(replay)
            else:
                replay.brought_something = replay.is_of_use = True
                await self._offer(frames, replayed=True)

    async def _offer(self, frames: list[bytes], *, replayed: bool) -> None:
        """One message: whatever stands before it, the last two frames are number and batch."""
        await self._intake.pause()
        self._trust.received(sum(map(len, frames)), time.monotonic())
        number = int.from_bytes(frames[-2], "big", signed=True) if len(frames) > 1 and len(frames[-2]) == 8 else -1
        if number < 0 or len(frames) > MAX_FRAMES:
            self._intake.refuse("it sent a message that is no numbered batch")
            return
        self.last_heard = time.monotonic()
        await self._take(self._feed.offer(number, frames[-1], replayed=replayed))

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
            cause = likely_cause(self.counts, self.address, self.is_connected, self.contents.block_size)
            self._say(f"{self.contents.silence} requests ended and nothing of use was heard: {cause}")
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
            await self._intake.pause()

    # ------------------------------------------------------------------------------------------------------- contents

    async def _take(self, due: Due) -> None:
        if due.void:
            self._intake.void()
        await self._intake.take(due.batches)

    def _say(self, text: str) -> None:
        print(f"headstart: KV events of {self.address.url}: {text}", file=sys.stderr, flush=True)
