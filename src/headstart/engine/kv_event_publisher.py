"""KV events for routers: ZMQ PUB and msgpack in the format of vLLM 0.32, with a socket that replays missed batches.

A message has three frames: topic, sequence number (8 bytes, big endian, from 0), payload (kv_event_encoding.py). A
consumer that misses a number requests the batches from that number on from the replay socket. Publishing runs in its
own thread: a step never waits for a consumer. Batches that do not fit into the queue are counted and dropped with their
number, so that consumers see the gap.
"""

import queue
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from typing import Annotated, Literal, NamedTuple

import msgspec
import zmq

from headstart.core.cache.events import Event
from headstart.core.errors import ConfigError
from headstart.engine.kv_event_encoding import KVEventEncoder

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
REPLAY_POLL_SECONDS = 0.05
CLOSE_SECONDS = 2.0
LINGER_MILLISECONDS = 500  # for the last batches, when the engine stops

LOOPBACK_ENDPOINT = "tcp://127.0.0.1:5557"  # bound, although it is no wildcard

Count = Annotated[int, msgspec.Meta(ge=0)]


class KVEventsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of --kv-events-config: vLLM's names and defaults but for `endpoint`, and `int_block_hashes`."""

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] | None = None  # None: zmq if events are enabled
    endpoint: str = LOOPBACK_ENDPOINT  # vLLM's is tcp://*:5557: all interfaces get the tokens of all prompts
    replay_endpoint: str | None = None
    buffer_steps: Count = 10_000  # batches kept for replay
    hwm: Count = 100_000  # messages per slow subscriber, then ZMQ drops its newest; 0: no limit
    max_queue_size: Annotated[int, msgspec.Meta(ge=1)] = 100_000  # batches not yet sent
    topic: str = ""
    int_block_hashes: bool = False  # the last 64 bits as int, for consumers that do not support bytes


def parse_kv_events_config(text: str | None) -> KVEventsConfig | None:
    """Return the config in --kv-events-config, None if it does not enable events. Raises ConfigError."""
    if text is None:
        return None
    try:
        config = msgspec.json.decode(text, type=KVEventsConfig)
    except msgspec.DecodeError as error:
        keys = ", ".join(KVEventsConfig.__struct_fields__)
        raise ConfigError(f"kv_events_config: {error}; it is a JSON object with any of the keys {keys}") from None
    if not config.enable_kv_cache_events or config.publisher == "null":
        return None
    endpoints = {"endpoint": config.endpoint, "replay_endpoint": config.replay_endpoint}
    for key, endpoint in endpoints.items():
        if endpoint is not None and not endpoint.startswith(("tcp://", "ipc://")):
            raise ConfigError(f"kv_events_config: {key} is {endpoint!r}; write it like tcp://*:5557 or ipc:///tmp/name")
    if config.endpoint == config.replay_endpoint and not _any_port(config.endpoint):
        raise ConfigError(
            f"kv_events_config: endpoint and replay_endpoint are both {config.endpoint!r}; they must differ"
        )
    return config


class KVEventPublisher:
    """A publisher of event batches with its own thread, until close(), garbage collection or interpreter exit."""

    def __init__(self, config: KVEventsConfig, *, medium: str) -> None:
        """Open the sockets; `medium`, "CPU" or "GPU", is the location of the blocks. Raises ConfigError on failure."""
        self._num_batches = 0
        self._num_rejected = 0  # batches that found the queue full
        self._queue: queue.Queue[_Batch | None] = queue.Queue(config.max_queue_size)
        self._sender = sender = _Sender(config, medium)
        self.endpoint, self.replay_endpoint = sender.endpoint, sender.replay_endpoint
        thread = threading.Thread(target=sender.run, args=(self._queue,), name="kv-events", daemon=True)
        thread.start()
        self._finalizer = weakref.finalize(self, _stop, self._queue, thread)

    @property
    def num_dropped_batches(self) -> int:
        """Number of batches dropped because the queue was full or sending failed."""
        return self._num_rejected + self._sender.num_failed

    def publish(self, events: list[Event]) -> None:
        """Queue the events of one step. Never blocks and never raises."""
        batch = _Batch(self._num_batches, time.time(), events)
        self._num_batches += 1
        try:
            self._queue.put_nowait(batch)
        except queue.Full:
            count = self._num_rejected = self._num_rejected + 1
            if count & (count - 1) == 0:  # 1, 2, 4, 8 ...: limits the number of log lines
                _say(f"dropped batch {batch.seq}: {self._queue.maxsize} are waiting; {count} dropped so far")

    def close(self) -> None:
        """Send the queued batches and close the sockets. Idempotent."""
        self._finalizer()


class _Batch(NamedTuple):
    seq: int
    ts: float  # seconds since 1970
    events: list[Event]


class _Sender:
    """The sockets and the body of the thread. It must not reference the publisher, whose finalizer stops the thread."""

    def __init__(self, config: KVEventsConfig, medium: str) -> None:
        self.num_failed = 0  # batches
        self._topic = config.topic.encode()
        self._encoder = KVEventEncoder(medium, int_block_hashes=config.int_block_hashes)
        self._sent: deque[tuple[bytes, bytes, bytes]] = deque(maxlen=config.buffer_steps)  # the three frames
        self._context = zmq.Context()
        self._replay: zmq.Socket[bytes] | None = None
        try:
            self._pub = self._open(zmq.PUB, config.endpoint, config.hwm)
            if config.replay_endpoint is not None:
                # A whole replay must fit, or a ROUTER silently drops the rest, with the end marker. It learns that
                # messages were read only when half of what may wait was read, so twice as many must fit.
                self._replay = self._open(zmq.ROUTER, config.replay_endpoint, 2 * (config.buffer_steps + 2))
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self.endpoint = _last_endpoint(self._pub)
        self.replay_endpoint = None if self._replay is None else _last_endpoint(self._replay)
        replay = "" if self.replay_endpoint is None else f", replay at {self.replay_endpoint}"
        where = "at" if _is_bound(config.endpoint) else "to the consumer at"
        _say(f"{where} {self.endpoint}{replay}; they contain the token ids of all prompts, so restrict access")

    def run(self, batches: "queue.Queue[_Batch | None]") -> None:
        """Send batches until the sentinel None, serving replay requests in between; then close the sockets."""
        timeout = None if self._replay is None else REPLAY_POLL_SECONDS
        try:
            while True:
                try:
                    batch = batches.get(timeout=timeout)
                except queue.Empty:
                    self._answer_replays()
                    continue
                if batch is None:
                    return
                self._send(batch)
                self._answer_replays()
        finally:
            self._context.destroy(linger=LINGER_MILLISECONDS)

    def _send(self, batch: _Batch) -> None:
        try:
            frames = (self._topic, batch.seq.to_bytes(8, "big"), self._encoder.encode(batch.ts, batch.events))
            self._pub.send_multipart(frames)
            self._sent.append(frames)
        except Exception as error:  # only this batch fails: counted, logged, and visible to consumers as a gap
            self.num_failed += 1
            _say(f"batch {batch.seq} could not be sent ({type(error).__name__}: {error})")
            traceback.print_exc()

    def _answer_replays(self) -> None:
        """Send every kept batch from the requested number on, then the end marker. As in vLLM, with the topic frame."""
        while self._replay is not None and self._replay.poll(0):
            request = self._replay.recv_multipart()
            if len(request) != 3 or len(request[2]) != 8:
                _say(f"not a replay request: {len(request)} frames; send an empty one and 8 bytes, big endian")
                continue
            client, _, start = request
            for frames in self._sent:
                if frames[1] >= start:  # big endian: bytes order as numbers do
                    self._replay.send_multipart((client, b"", *frames))
            self._replay.send_multipart((client, b"", b"", END_OF_REPLAY, b""))

    def _open(self, kind: int, endpoint: str, hwm: int) -> "zmq.Socket[bytes]":
        """Return an open socket. As in vLLM, wildcards and ipc are bound; a PUB with another address connects to it."""
        sock = self._context.socket(kind)
        sock.set_hwm(hwm)
        if "[" in endpoint or "::" in endpoint:
            sock.setsockopt(zmq.IPV6, 1)
        try:
            if kind == zmq.ROUTER or _is_bound(endpoint):
                sock.bind(endpoint)
            else:
                sock.connect(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"kv_events_config: cannot use {endpoint} ({error.strerror}); name another one, or free this one"
            ) from None
        return sock


def _stop(batches: "queue.Queue[_Batch | None]", thread: threading.Thread) -> None:
    try:
        batches.put(None, timeout=CLOSE_SECONDS)
    except queue.Full:
        return  # the thread hangs; as a daemon it ends with the process
    thread.join(CLOSE_SECONDS)


def _is_bound(endpoint: str) -> bool:
    return endpoint == LOOPBACK_ENDPOINT or "*" in endpoint or "::" in endpoint or endpoint.startswith("ipc://")


def _any_port(endpoint: str) -> bool:
    return endpoint.startswith("tcp://") and endpoint.endswith((":0", ":*"))


def _last_endpoint(sock: "zmq.Socket[bytes]") -> str:
    return sock.getsockopt_string(zmq.LAST_ENDPOINT)


def _say(text: str) -> None:
    print(f"headstart: KV events: {text}", file=sys.stderr, flush=True)
