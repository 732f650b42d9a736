"""The sockets of a KV event consumer: how they are set, and the one that asks a publisher for batches again."""

import time

import zmq
import zmq.asyncio

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
MAX_QUEUED = 1_000  # live messages; then the publisher's own queue fills
MAX_QUEUED_REPLAY = 10_000  # what publishers keep: they drop what does not fit
MAX_MESSAGE_BYTES = 2**24  # of a frame; the batch of a step of 128,000 tokens has 1 MB. More closes the connection
MAX_FRAMES = 8  # of a message: topic, number and batch, and what stands before them in an answer
HEARTBEAT_MILLISECONDS = 5_000  # a publisher that does not answer for three of these is gone
RECONNECT_MILLISECONDS = 100  # doubles at every try, up to ten times that


class Replay:
    """The socket that asks for batches, and what was asked."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str) -> None:
        self.heard_at = 0.0  # or asked; seconds, time.monotonic()
        self.is_under_way = False
        self.brought_something = False  # the replay that was asked for last
        self.is_of_use = False  # one ever did: the publisher keeps batches
        self._context, self._endpoint = context, endpoint
        self._mark = (0, 0)
        self.socket = self._open()

    def ask(self, start: int, mark: tuple[int, int]) -> None:
        """Asks for the batches from `start` on; `mark` says how far we are."""
        if self.is_under_way:
            self._renew()
        self.is_under_way, self.heard_at, self._mark = True, time.monotonic(), mark
        self.brought_something = False
        self.socket.send_multipart((b"", start.to_bytes(8, "big")), zmq.NOBLOCK)

    def end(self, in_time: bool) -> tuple[int, int]:
        """It came to its end, or will not come any more; how far we were when it was asked for."""
        self.is_under_way = False
        if not in_time:
            self._renew()
        return self._mark

    def close(self) -> None:
        self.socket.close(linger=0)

    def _renew(self) -> None:
        """Another socket: what is still on its way to the last one must not be taken for an answer to the next."""
        self.close()
        self.socket = self._open()

    def _open(self) -> zmq.asyncio.Socket:
        sock = self._context.socket(zmq.DEALER)
        prepare(sock, MAX_QUEUED_REPLAY)
        sock.connect(self._endpoint)
        return sock


def subscribe(context: zmq.asyncio.Context, endpoint: str) -> tuple[zmq.asyncio.Socket, zmq.asyncio.Socket]:
    """The socket that hears a publisher's batches, and the one that tells of its connections. Raises ZMQError."""
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
    """Sets what every socket needs; before it connects."""
    sock.set_hwm(max_queued)
    sock.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    sock.setsockopt(zmq.IPV6, 1)
    sock.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MILLISECONDS)
    sock.setsockopt(zmq.RECONNECT_IVL_MAX, 10 * RECONNECT_MILLISECONDS)
    sock.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MILLISECONDS)
    sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * HEARTBEAT_MILLISECONDS)


async def receive(sock: zmq.asyncio.Socket) -> list[bytes] | None:
    """The message that is there; None if none is."""
    try:
        return await sock.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None
