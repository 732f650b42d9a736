"""The sockets of a KV event consumer: how they are set, and the one that asks a publisher for batches again."""

import time

import zmq
import zmq.asyncio

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
MAX_QUEUED = 100_000  # messages; then the publisher's own queue fills
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
        prepare(sock)
        sock.connect(self._endpoint)
        return sock


def prepare(sock: zmq.asyncio.Socket) -> None:
    """Sets what every socket needs; before it connects."""
    sock.set_hwm(MAX_QUEUED)
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
