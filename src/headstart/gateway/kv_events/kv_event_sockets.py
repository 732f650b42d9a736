"""The sockets of a KV event consumer: their options, and the socket that requests a replay."""

import time

import zmq
import zmq.asyncio

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
MAX_QUEUED = 1_000  # live messages; then the publisher's own queue fills
MAX_QUEUED_REPLAY = 10_000  # as many as publishers keep: they drop what does not fit
MAX_MESSAGE_BYTES = 2**24  # of a frame; a step of 128,000 tokens has a batch of 1 MB. More closes the connection
MAX_FRAMES = 8  # of a message: topic, number and batch, and the frames before them in a reply
HEARTBEAT_MILLISECONDS = 5_000  # a publisher that does not answer for three of these is gone
RECONNECT_MILLISECONDS = 100  # doubles at every attempt, up to ten times that


class Replay:
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

    def end(self, in_time: bool) -> tuple[int, int]:
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
        prepare(sock, MAX_QUEUED_REPLAY)
        sock.connect(self._endpoint)
        return sock


def subscribe(context: zmq.asyncio.Context, endpoint: str) -> tuple[zmq.asyncio.Socket, zmq.asyncio.Socket]:
    """Return the socket that receives a publisher's batches, and the monitor of its connections. Raises ZMQError."""
    sub = context.socket(zmq.SUB)
    try:
        monitor = sub.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        prepare(sub, MAX_QUEUED)
        sub.setsockopt(zmq.SUBSCRIBE, b"")
        sub.connect(endpoint)
    except zmq.ZMQError:
        sub.disable_monitor()
        sub.close(linger=0)
        raise
    return sub, monitor


def prepare(sock: zmq.asyncio.Socket, max_queued: int) -> None:
    """Set the options that every socket needs; call before it connects."""
    sock.set_hwm(max_queued)
    sock.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    sock.setsockopt(zmq.IPV6, 1)
    sock.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MILLISECONDS)
    sock.setsockopt(zmq.RECONNECT_IVL_MAX, 10 * RECONNECT_MILLISECONDS)
    sock.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MILLISECONDS)
    sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * HEARTBEAT_MILLISECONDS)


async def receive(sock: zmq.asyncio.Socket) -> list[bytes] | None:
    """Return the next message; None if there is none."""
    try:
        return await sock.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None
