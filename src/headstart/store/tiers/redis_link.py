"""RedisConnection: calls to a Redis or Valkey server, each with one deadline for all of it; and inspection without a
secret.

Keys: headstart:kv:SPACE:b:NAME is a sealed block, headstart:kv:SPACE:index the stream that announces blocks; SPACE is
one secret, model and block size. Everything a server answers may be wrong, late, or never come:
`RedisConnection.run` turns all that into TierError.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from socket import socket
from typing import Any, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from headstart.core.errors import ConfigError
from headstart.store.tiers.sealing import damage_of_value
from headstart.store.tiers.tier import TierError, parse_tier_places

PREFIX = b"headstart:kv:"
CONNECT_SECONDS = 1.0
MIN_SECONDS = 1e-6  # a timeout of 0 would mean not to wait
INSPECT_SECONDS = 30.0
SPARE_BYTES = 64  # of a buffer for values: what a server sends before each
SCAN_COUNT, READ_COUNT = 1000, 16  # keys per call
T = TypeVar("T")


class RedisConnection:
    """One connection, for one thread. It is opened at the first call, and again after a failure."""

    def __init__(self, url: str, password: str | None, seconds: float) -> None:
        """`seconds`: the deadline of a call, however many bytes it moves. Raises ConfigError for an invalid URL."""
        options: dict[str, Any] = {} if password is None else {"password": password}
        try:
            self._pool: redis.ConnectionPool = redis.ConnectionPool.from_url(
                url,
                socket_timeout=seconds,
                socket_connect_timeout=min(CONNECT_SECONDS, seconds),
                retry=Retry(NoBackoff(), 0),
                protocol=2,
                **options,
            )
        except ValueError as error:
            raise ConfigError(f"--kv-store {url}: {error}") from error
        self._redis, self._seconds = redis.Redis(connection_pool=self._pool), seconds
        self._connection: Any = None  # that `request` sent to
        self._is_awaited = False  # its answer

    def run(self, call: Callable[[redis.Redis], T]) -> T:
        """Return the result of a call. Raises TierError: no connection, an error, nonsense, or not within the deadline.

        A timeout of the socket alone would not do: a server that sends a byte now and then never reaches it.
        """
        was_late = threading.Event()

        def cut() -> None:
            was_late.set()
            self._pool.disconnect()

        timer = threading.Timer(self._seconds, cut)
        timer.daemon = True
        timer.start()
        try:
            return call(self._redis)
        except Exception as error:  # a connection cut in the middle of a call fails in many ways
            raise self._failure(error, is_late=was_late.is_set()) from error
        finally:
            timer.cancel()

    def request(self, names: Sequence[bytes]) -> None:
        """Ask for the values of keys, which `receive` returns. Raises TierError.

        An answer that was not received is dropped with its connection. The connection is kept, since to watch a call
        with a thread, as `run` does, takes longer than the call where cores are busy.
        """
        try:
            if not self._is_ready():
                self._drop()
                self._connection = self.run(lambda _: self._pool.get_connection())
            self._is_awaited = True
            self._connection.send_command("MGET", *names)
        except Exception as error:
            self._drop()
            raise self._failure(error) from error

    def receive(self, num: int, most: int, buffer: bytearray) -> list[memoryview | None]:
        """Return `num` requested values, as views of `buffer`; None: there is none. One longer than `most` is empty.

        `buffer` has `most` and SPARE_BYTES for each. redis-py copies what it receives three times. Raises TierError.
        """
        try:
            values = _Answer(self._connection._sock, buffer, self._seconds).values(num, most)  # noqa: SLF001
        except Exception as error:
            self._drop()
            raise self._failure(error) from error
        self._is_awaited = False
        return values

    def close(self) -> None:
        self._pool.disconnect()

    def _is_ready(self) -> bool:
        """Return whether the connection is open and no answer is to come: a server closes those that are idle."""
        with suppress(Exception):
            return self._connection is not None and not self._is_awaited and not self._connection.can_read()
        return False

    def _drop(self) -> None:
        """Close the connection of `request`, if any, and what it would still answer."""
        connection, self._connection, self._is_awaited = self._connection, None, False
        if connection is not None:
            connection.disconnect()
            self._pool.release(connection)

    def _failure(self, error: Exception, *, is_late: bool = False) -> TierError:
        if isinstance(error, TierError):
            return error
        is_late = is_late or isinstance(error, (redis.TimeoutError, TimeoutError))
        text = f"no complete answer within {self._seconds:g} s" if is_late else str(error) or type(error).__name__
        return TierError(text.splitlines()[0])


class _Answer:
    """An answer of the server (RESP2), received into a buffer; it lies at `[_at, _end)` as far as it is not taken."""

    def __init__(self, sock: socket, buffer: bytearray, seconds: float) -> None:
        """`seconds`: within which all of it must be received; TimeoutError is raised otherwise."""
        self._sock, self._buffer, self._view = sock, buffer, memoryview(buffer)
        self._at = self._end = 0
        self._until = time.monotonic() + seconds

    def values(self, num: int, most: int) -> list[memoryview | None]:
        """Return the values of an answer to MGET. Raises OSError or ValueError if it is none."""
        if self._number(b"*") != num:
            raise ValueError("the answer has another number of values")
        return [self._value(most) for _ in range(num)]

    def _value(self, most: int) -> memoryview | None:
        length = self._number(b"$")
        if length < 0:
            return None
        kept = length <= most
        value = self._take(length) if kept else self._drop(length)
        if bytes(self._take(2)) != b"\r\n":
            raise ValueError("the answer has a value without its end")
        return value

    def _number(self, kind: bytes) -> int:
        """Take a line and return its number. Raises ValueError if it is of another kind, with the text of an error."""
        while (end := self._buffer.find(b"\r\n", self._at, min(self._end, self._at + SPARE_BYTES))) < 0:
            if self._end - self._at >= SPARE_BYTES:
                raise ValueError(bytes(self._view[self._at : self._at + SPARE_BYTES]).decode("ascii", "replace"))
            self._receive()
        line = bytes(self._take(end + 2 - self._at))[:-2]
        if not line.startswith(kind):
            raise ValueError(line.decode("ascii", "replace") or "the answer is empty")
        return int(line[1:])

    def _take(self, num: int) -> memoryview:
        while self._end - self._at < num:
            self._receive()
        self._at += num
        return self._view[self._at - num : self._at]

    def _drop(self, num: int) -> memoryview:
        """Remove bytes that do not fit."""
        while self._end - self._at < num:
            num -= self._end - self._at
            self._end = self._at
            self._receive()
        rest = bytes(self._view[self._at + num : self._end])
        self._end = self._at + len(rest)
        self._view[self._at : self._end] = rest
        return self._view[:0]

    def _receive(self) -> None:
        self._sock.settimeout(max(self._until - time.monotonic(), MIN_SECONDS))
        num = self._sock.recv_into(self._view[self._end :])
        if not num:
            raise ConnectionError("the server closed the connection, or sent more than it was asked for")
        self._end += num


@dataclass(slots=True)
class BlockSpaceStats:
    """The blocks of one secret, model and block size."""

    space: str
    num_blocks: int = 0
    num_bytes: int = 0  # of their values


@dataclass(slots=True)
class RedisStats:
    """The blocks of a server, by space, the largest first. `bad` counts damaged values by reason, if they were read."""

    spaces: list[BlockSpaceStats] = field(default_factory=list[BlockSpaceStats])
    bad: Counter[str] = field(default_factory=Counter[str])

    @property
    def num_blocks(self) -> int:
        return sum(space.num_blocks for space in self.spaces)

    @property
    def num_bytes(self) -> int:
        return sum(space.num_bytes for space in self.spaces)


def open_inspection_link(url: str, password: str | None) -> RedisConnection:
    """Return a link for the functions below. Raises ConfigError."""
    return RedisConnection(parse_tier_places(url).url or url, password, INSPECT_SECONDS)


def stat_redis(link: RedisConnection) -> RedisStats:
    """Count the blocks of all spaces. Raises TierError."""

    def sizes(names: list[bytes]) -> list[tuple[int, str]]:
        return [(int(size), "") for size in link.run(lambda server: _sizes(server, names))]

    return _survey(link, SCAN_COUNT, sizes)


def verify_redis(link: RedisConnection) -> RedisStats:
    """Read every value and check it as far as that is possible without its secret. Raises TierError."""

    def checked(names: list[bytes]) -> list[tuple[int, str]]:
        values: list[Any] = link.run(lambda server: server.mget(names))
        pairs = zip(names, values, strict=True)
        return [(len(value), damage_of_value(value, _parts(name)[1])) for name, value in pairs if value is not None]

    return _survey(link, READ_COUNT, checked)


def clear_redis(link: RedisConnection, space: bytes = b"") -> int:
    """Delete all blocks, or those of one space, and their indexes. Return the number of blocks. Raises TierError."""
    num_blocks = 0
    for names in _scan(link, PREFIX + space):
        num_blocks += sum(_is_block(name) for name in names)
        link.run(lambda server, names=names: server.unlink(*names))
    return num_blocks


def _sizes(server: redis.Redis, names: list[bytes]) -> list[Any]:
    pipeline = server.pipeline(transaction=False)
    for name in names:
        pipeline.strlen(name)
    return pipeline.execute()


def _survey(link: RedisConnection, at_once: int, look: Callable[[list[bytes]], list[tuple[int, str]]]) -> RedisStats:
    """Return the statistics of all blocks; `look` returns the size and the fault of each of these."""
    found, spaces = RedisStats(), dict[bytes, BlockSpaceStats]()
    for scanned in _scan(link, PREFIX):
        blocks = [name for name in scanned if _is_block(name)]
        for start in range(0, len(blocks), at_once):
            names = blocks[start : start + at_once]
            for name, (size, reason) in zip(names, look(names), strict=False):
                space = _parts(name)[0]
                stats = spaces.setdefault(space, BlockSpaceStats(space.decode("ascii", "replace")))
                found.bad.update([reason] if reason else [])
                stats.num_blocks += not reason
                stats.num_bytes += size
    found.spaces = sorted(spaces.values(), key=lambda stats: -stats.num_bytes)
    return found


def _scan(link: RedisConnection, prefix: bytes) -> Iterator[list[bytes]]:
    """Yield the keys with a prefix, in portions; one may come twice while others write."""
    cursor, pattern = 0, prefix + b"*"
    while True:
        answer: Any = link.run(lambda server, at=cursor: server.scan(at, match=pattern, count=SCAN_COUNT))
        cursor, names = answer
        if names := [name for name in names if name.startswith(prefix)]:
            yield names
        if not cursor:
            return


def _parts(name: bytes) -> tuple[bytes, bytes]:
    """Return the space and the name of a block."""
    space, _, rest = name[len(PREFIX) :].partition(b":")
    return space, rest.removeprefix(b"b:")


def _is_block(name: bytes) -> bool:
    return name[len(PREFIX) :].partition(b":")[2].startswith(b"b:")
