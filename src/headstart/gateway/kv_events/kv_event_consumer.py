"""KVEventConsumer: subscribes to the KV events of one replica (ZMQ, vLLM's format) and maintains its KV event index.

Everything runs on the event loop's thread. A SUB socket receives the batches; a DEALER socket requests missed ones from
the replay socket, if there is one: all batches when the router connects, those in a gap, and, after a quiet period,
those that may have been lost at the end. Without replay, a gap or a lost connection clears the index: it may then hold
less than the engine's cache, never more. Long batches are applied in slices between which requests are routed
(kv_event_intake.py).

A publisher whose batches cannot be read, or whose consumer fails, is suspended (kv_event_intake.py): the sockets are
closed, the index is cleared, the cache is approximated, and after a pause everything starts again.
"""

import asyncio
import sys
import time
from collections.abc import Mapping
from typing import NoReturn

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from headstart.gateway.kv_events.kv_event_intake import (
    KVEventApplier,
    PublisherAbuseRecord,
    Reconfigured,
    UntrustedPublisherError,
)
from headstart.gateway.replicas.replica_address import ReplicaAddress
from headstart.http.logs import ServerLog
from headstart.router.index.event_sequencer import DueBatches, EventSequencer
from headstart.router.index.kv_event_index import NOT_USED, ReplicaKVEventIndex

POLL_SECONDS = 0.5  # the longest interval between two checks
QUIET_SECONDS = 1.0  # after the last live batch, before a replay is requested to learn whether it was the last
CHECK_SECONDS = 15.0  # after which a replay is requested in any case: live batches may all be lost
REPLAY_SECONDS = 5.0  # without a message of a replay, after which the replay has failed
RETRY_SECONDS = 5.0  # after a socket could not be created
RENEW_SECONDS = 10.0  # without a connection, after which a new socket is created
MAX_ROUND = 1_000  # messages of one socket before the other is read
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
MAX_QUEUED = 1_000  # live messages; then the publisher's own queue fills
MAX_QUEUED_REPLAY = 10_000  # as many as publishers keep: they drop what does not fit
MAX_MESSAGE_BYTES = 2**24  # of a frame; a step of 128,000 tokens has a batch of 1 MB. More closes the connection
MAX_FRAMES = 8  # of a message: topic, number and batch, and the frames before them in a reply
HEARTBEAT_MILLISECONDS = 5_000  # a publisher that does not answer for three of these is gone
RECONNECT_MILLISECONDS = 100  # doubles at every attempt, up to ten times that


class ReplaySocket:
    """The socket that requests batches, and the state of the current request."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str) -> None:
        self.heard_at = 0.0  # or requested; seconds, time.monotonic()
        self.is_under_way = False
        self.has_batches = False  # in the replay requested last
        self.keeps_batches = False  # a replay ever brought batches: the publisher keeps them
        self._context, self._endpoint = context, endpoint
        self._mark = (0, 0)
        self.socket = self._open()

    def request(self, start: int, mark: tuple[int, int]) -> None:
        """Request the batches from `start` on; `mark` is the consumer's position."""
        if self.is_under_way:
            self._renew()
        self.is_under_way, self.heard_at, self._mark = True, time.monotonic(), mark
        self.has_batches = False
        self.socket.send_multipart((b"", start.to_bytes(8, "big")), zmq.NOBLOCK)

    def end_replay(self, in_time: bool) -> tuple[int, int]:
        """End a replay that is complete or failed; return the consumer's position at its request."""
        self.is_under_way = False
        if not in_time:
            self._renew()
        return self._mark

    def close(self) -> None:
        self.socket.close(linger=0)

    def _renew(self) -> None:
        """Open a new socket: late replies to the old one must not be taken for replies to the next request."""
        self.close()
        self.socket = self._open()

    def _open(self) -> zmq.asyncio.Socket:
        sock = self._context.socket(zmq.DEALER)
        set_socket_options(sock, MAX_QUEUED_REPLAY)
        sock.connect(self._endpoint)
        return sock


def open_subscription(context: zmq.asyncio.Context, endpoint: str) -> tuple[zmq.asyncio.Socket, zmq.asyncio.Socket]:
    """Return the socket that receives a publisher's batches, and the monitor of its connections. Raises ZMQError."""
    sub = context.socket(zmq.SUB)
    try:
        monitor = sub.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        set_socket_options(sub, MAX_QUEUED)
        sub.setsockopt(zmq.SUBSCRIBE, b"")
        sub.connect(endpoint)
    except zmq.ZMQError:
        sub.disable_monitor()
        sub.close(linger=0)
        raise
    return sub, monitor


def set_socket_options(sock: zmq.asyncio.Socket, max_queued: int) -> None:
    """Set the options that every socket needs; call before it connects."""
    sock.set_hwm(max_queued)
    sock.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    sock.setsockopt(zmq.IPV6, 1)
    sock.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MILLISECONDS)
    sock.setsockopt(zmq.RECONNECT_IVL_MAX, 10 * RECONNECT_MILLISECONDS)
    sock.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MILLISECONDS)
    sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * HEARTBEAT_MILLISECONDS)


async def receive_available_message(sock: zmq.asyncio.Socket) -> list[bytes] | None:
    """Return the next message; None if there is none."""
    try:
        return await sock.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None


class KVEventConsumer:
    """The consumer of one replica's KV events. `kind`: "vllm", "sglang" or "headstart" (KVEventDecoder).

    The index is kept current while `run` runs. `reconfigured` is called with the block size if a replica with an empty
    cache has another one than its index, and returns the index to continue with; without it such events are counted and
    ignored.
    """

    def __init__(
        self,
        address: ReplicaAddress,
        index: ReplicaKVEventIndex,
        *,
        kind: str,
        reconfigured: Reconfigured | None = None,
    ) -> None:
        assert address.events is not None, f"{address.url} publishes no events"
        self.address = address
        self.is_connected = False
        self.is_suspended = False  # its events are ignored for a while
        self.last_heard: float | None = None  # of a batch, live or replayed; seconds, time.monotonic()
        self._trust = PublisherAbuseRecord()
        self._intake = KVEventApplier(index, kind, self._trust, self._say, reconfigured)
        self._feed = EventSequencer(replays=address.replay is not None)
        self._replay: ReplaySocket | None = None
        self._own = dict.fromkeys(("heard", "connections", "replays", "suspensions", "failures"), 0)
        self._active_at: float | None = None  # the last live batch or connection, if no replay was requested since
        self._was_blind = False

    @property
    def index(self) -> ReplicaKVEventIndex:
        """The index that is kept current. It may be replaced: a new one is filled again if there is a replay socket."""
        return self._intake.index

    @index.setter
    def index(self, index: ReplicaKVEventIndex) -> None:
        self._intake.replace_index(index)
        self._feed.reset()
        self._active_at = time.monotonic()

    @property
    def counts(self) -> dict[str, int]:
        """Counters for metrics: they only grow.

        `heard`: live batches; `batches`: batches applied, live or replayed; `lost`: batches given up; `undecodable`:
        batches that could not be read. `voids`: times that the index was cleared. `unknown_parents`, `unknown_copies`,
        `other_block_size`, `other_groups`, `unknown_events`, `malformed`: ignored events. `over_capacity`: times that
        the index exceeded its bound. `suspensions`: times that the publisher was suspended; `failures`: those because
        the consumer failed.
        """
        feed = {"gaps": self._feed.num_gaps, "lost": self._feed.num_lost, "restarts": self._feed.num_restarts}
        return {**self._own, **feed, **self._intake.counts}

    @property
    def next_batch_number(self) -> int:
        """The number of the next batch in order."""
        return self._feed.next_batch_number

    @property
    def has_batch_in_progress(self) -> bool:
        """Whether batches before `position` are still being applied, with other tasks in between."""
        return self._intake.is_applying

    @property
    def has_gap(self) -> bool:
        """Whether batches wait behind a gap."""
        return self._feed.replay_from is not None

    @property
    def lacks_usable_events(self) -> bool:
        """Whether requests to the replica end and no usable event about them arrives."""
        return self.index.relies_on_unusable_events

    async def run(self) -> None:
        """Listen until cancelled. If there is no publisher, or no longer, try again indefinitely."""
        context = zmq.asyncio.Context()
        try:
            while True:
                pause = await self._attempt(context)
                self._intake.clear_index()
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
            pause = self._trust.suspend_publisher(time.monotonic())
            self._say(f"{error}; its cache is approximated, and its events are read again in {pause:.0f} s")
        except Exception as error:  # an internal error must not end the consumer: the index would never change again
            pause = self._trust.suspend_publisher(time.monotonic())
            self._own["failures"] += 1
            ServerLog().log_exception("kv_event_listener_failed", error, self.address.url)
        self.is_suspended = True
        self._own["suspensions"] += 1
        return pause

    # ------------------------------------------------------------------------------------------------------ sockets

    async def _listen(self, context: zmq.asyncio.Context) -> NoReturn:
        """Receive batches and request missing ones. Raises ZMQError and UntrustedPublisherError."""
        self._replay = None if self.address.replay is None else ReplaySocket(context, self.address.replay)
        try:
            while True:
                await self._listen_while_connected(context)
        finally:
            self.is_connected = False
            if self._replay is not None:
                self._replay.close()

    async def _listen_while_connected(self, context: zmq.asyncio.Context) -> None:
        """Listen on one SUB socket; return after RENEW_SECONDS without a connection.

        After an oversized message libzmq does not reconnect, so a new socket is needed.
        """
        sub, monitor = open_subscription(context, self.address.events or "")
        connected_at = time.monotonic()
        try:
            while time.monotonic() - connected_at <= RENEW_SECONDS:
                poller = zmq.asyncio.Poller()
                for sock in (sub, monitor, *([self._replay.socket] if self._replay is not None else [])):
                    poller.register(sock, zmq.POLLIN)
                await poller.poll(round(POLL_SECONDS * 1000))
                await self._connections(monitor)
                await self._receive_live(sub)
                if self._replay is not None:
                    await self._receive_replay(self._replay)
                await self._check()
                if self.is_connected:
                    connected_at = time.monotonic()
        finally:
            sub.disable_monitor()
            sub.close(linger=0)

    async def _connections(self, monitor: zmq.asyncio.Socket) -> None:
        """Track connections. Behind a new connection there may be a new publisher, and batches were missed."""
        while (frames := await receive_available_message(monitor)) is not None:
            if parse_monitor_message(frames)["event"] != zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.is_connected = False
                continue
            self.is_connected = True
            self._own["connections"] += 1
            if self._replay is not None:
                self._request_replay(self._replay)
                self._active_at = time.monotonic()  # batches published before the subscription arrives are not sent
            elif self._own["connections"] > 1:
                await self._take(self._feed.reset())

    async def _receive_live(self, sub: zmq.asyncio.Socket) -> None:
        for _ in range(MAX_ROUND):
            frames = await receive_available_message(sub)
            if frames is None:
                return
            self._own["heard"] += 1
            self._active_at = time.monotonic()
            await self._offer(frames, replayed=False)

    async def _receive_replay(self, replay: ReplaySocket) -> None:
        for _ in range(MAX_ROUND):
            frames = await receive_available_message(replay.socket)
            if frames is None:
                return
            replay.heard_at = time.monotonic()
            if 1 < len(frames) <= MAX_FRAMES and frames[-2] == END_OF_REPLAY:
                await self._replay_ended(replay)
            else:
                replay.has_batches = replay.keeps_batches = True
                await self._offer(frames, replayed=True)

    async def _offer(self, frames: list[bytes], *, replayed: bool) -> None:
        """Handle one message: its last two frames are batch number and batch; frames before them are ignored."""
        await self._intake.yield_if_due()
        self._trust.enforce_byte_rate(sum(map(len, frames)), time.monotonic())
        number = int.from_bytes(frames[-2], "big", signed=True) if len(frames) > 1 and len(frames[-2]) == 8 else -1
        if number < 0 or len(frames) > MAX_FRAMES:
            self._intake.strike_for_invalid_message("it sent a message that is no numbered batch")
            return
        self.last_heard = time.monotonic()
        await self._take(self._feed.offer(number, frames[-1], replayed=replayed))

    # ------------------------------------------------------------------------------------------------ what is missing

    async def _check(self) -> None:
        """Request missing batches, give up those that do not arrive, and log when no usable event does."""
        now, replay = time.monotonic(), self._replay
        if replay is None:
            await self._give_up()
        elif replay.is_under_way:
            if now - replay.heard_at > REPLAY_SECONDS:
                await self._replay_ended(replay, in_time=False)
        else:
            is_quiet = self._active_at is not None and now - self._active_at > QUIET_SECONDS
            if is_quiet or self.has_gap or now - replay.heard_at > CHECK_SECONDS:
                self._request_replay(replay)
        if self.lacks_usable_events and not self._was_blind:
            cause = why_no_usable_events(self.counts, self.address, self.is_connected, self.index.block_size)
            self._say(f"{self.index.silence} requests ended and no usable event arrived: {cause}")
        self._was_blind = self.lacks_usable_events

    def _request_replay(self, replay: ReplaySocket) -> None:
        """Request all batches from the last applied one on: that one shows whether the publisher is the same."""
        self._own["replays"] += 1
        self._active_at = None
        replay.request(
            max(self._feed.next_batch_number - 1, 0), (self._feed.num_restarts, self._feed.next_batch_number)
        )

    async def _replay_ended(self, replay: ReplaySocket, *, in_time: bool = True) -> None:
        """Give up batches that the replay did not bring.

        If it brought some, request another one: publishers cut long replays.
        """
        restarts, position = replay.end_replay(in_time)
        if in_time and position and not replay.has_batches and replay.keeps_batches:
            await self._take(
                self._feed.reset_for_new_publisher()
            )  # not even the requested batch, which was applied last
        is_another = restarts != self._feed.num_restarts
        if is_another or (position != self._feed.next_batch_number and (self.has_gap or not in_time)):
            self._request_replay(replay)
        else:
            await self._give_up()

    async def _give_up(self) -> None:
        """Continue behind the last gap, with an empty index: every batch that could fill one has arrived.

        Live batches may have come before a replay of later ones, so there may be several gaps.
        """
        due = DueBatches(False, [])
        while self.has_gap:
            due = self._feed.give_up()
        await self._take(due)

    # ------------------------------------------------------------------------------------------------------- contents

    async def _take(self, due: DueBatches) -> None:
        if due.void:
            self._intake.clear_index()
        await self._intake.take(due.batches)

    def _say(self, text: str) -> None:
        print(f"headstart: KV events of {self.address.url}: {text}", file=sys.stderr, flush=True)


def why_no_usable_events(
    counts: Mapping[str, int], address: ReplicaAddress, is_connected: bool, block_size: int
) -> str:
    """Return the likeliest reason why no event is usable, and what to do."""
    where = address.events
    worst = max(NOT_USED, key=lambda key: counts[key])
    if not is_connected:
        return f"nothing listens at {where}; are events enabled there (--kv-events-config), and is the port right?"
    if not counts["batches"]:
        return f"not one batch came from {where}; is enable_kv_cache_events on, and does its endpoint bind the port?"
    if counts["stored"]:
        return "there are events of blocks that others computed, but none of what these requests computed"
    if counts["undecodable"] or counts["malformed"]:
        return f"{counts['undecodable']} batches and {counts['malformed']} events cannot be read; another topic?"
    if counts["other_groups"] or not counts[worst]:
        return "there are no events of layers that keep the whole prefix"
    if worst == "other_block_size":
        return f"its blocks are not of {block_size} tokens, which is what the router expects"
    remedy = "give its replay endpoint, too" if address.replay is None else "let it keep more (buffer_steps)"
    return f"events refer to blocks that were stored before the router connected, or missed; {remedy}"
