"""RedisLink: calls to a Redis or Valkey server, each with one deadline for all of it; and inspection without a secret.

Keys: headstart:kv:SPACE:b:NAME is a sealed block, headstart:kv:SPACE:index the stream that announces blocks; SPACE is
one secret, model and block size. Everything a server answers may be wrong, late, or never come: `RedisLink.run` turns
all that into TierError.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from headstart.core.errors import ConfigError
from headstart.store.tiers.sealing import fault
from headstart.store.tiers.tier import TierError, places

PREFIX = b"headstart:kv:"
CONNECT_SECONDS = 1.0
INSPECT_SECONDS = 30.0
RECEIVE_BYTES = 4 << 20  # at once: a piece of a load; with redis-py's 64 KiB reading takes three times the CPU time
SCAN_COUNT, READ_COUNT = 1000, 16  # keys per call
T = TypeVar("T")


class RedisLink:
    """One connection, for one thread. It is opened at the first call, and again after a failure."""

    def __init__(self, url: str, password: str | None, seconds: float) -> None:
        """`seconds`: the deadline of a call, however many bytes it moves. Raises ConfigError for an invalid URL."""
        options: dict[str, Any] = {} if password is None else {"password": password}
        try:
            self._pool: redis.ConnectionPool = redis.ConnectionPool.from_url(
                url,
                socket_timeout=seconds,
                socket_connect_timeout=min(CONNECT_SECONDS, seconds),
                socket_read_size=RECEIVE_BYTES,
                retry=Retry(NoBackoff(), 0),
                protocol=2,
                **options,
            )
        except ValueError as error:
            raise ConfigError(f"--kv-store {url}: {error}") from error
        self._redis, self._seconds = redis.Redis(connection_pool=self._pool), seconds

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
            late = was_late.is_set() or isinstance(error, redis.TimeoutError)
            text = f"no complete answer within {self._seconds:g} s" if late else str(error) or type(error).__name__
            raise TierError(text.splitlines()[0]) from error
        finally:
            timer.cancel()

    def close(self) -> None:
        self._pool.disconnect()


@dataclass(slots=True)
class SpaceStats:
    """The blocks of one secret, model and block size."""

    space: str
    num_blocks: int = 0
    num_bytes: int = 0  # of their values


@dataclass(slots=True)
class ServerStats:
    """The blocks of a server, by space, the largest first. `bad` counts damaged values by reason, if they were read."""

    spaces: list[SpaceStats] = field(default_factory=list[SpaceStats])
    bad: Counter[str] = field(default_factory=Counter[str])

    @property
    def num_blocks(self) -> int:
        return sum(space.num_blocks for space in self.spaces)

    @property
    def num_bytes(self) -> int:
        return sum(space.num_bytes for space in self.spaces)


def inspect_link(url: str, password: str | None) -> RedisLink:
    """Return a link for the functions below. Raises ConfigError."""
    return RedisLink(places(url).url or url, password, INSPECT_SECONDS)


def stat_server(link: RedisLink) -> ServerStats:
    """Count the blocks of all spaces. Raises TierError."""

    def sizes(names: list[bytes]) -> list[tuple[int, str]]:
        return [(int(size), "") for size in link.run(lambda server: _sizes(server, names))]

    return _survey(link, SCAN_COUNT, sizes)


def verify_server(link: RedisLink) -> ServerStats:
    """Read every value and check it as far as that is possible without its secret. Raises TierError."""

    def checked(names: list[bytes]) -> list[tuple[int, str]]:
        values: list[Any] = link.run(lambda server: server.mget(names))
        pairs = zip(names, values, strict=True)
        return [(len(value), fault(value, _parts(name)[1])) for name, value in pairs if value is not None]

    return _survey(link, READ_COUNT, checked)


def clear_server(link: RedisLink, space: bytes = b"") -> int:
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


def _survey(link: RedisLink, at_once: int, look: Callable[[list[bytes]], list[tuple[int, str]]]) -> ServerStats:
    """Return the statistics of all blocks; `look` returns the size and the fault of each of these."""
    found, spaces = ServerStats(), dict[bytes, SpaceStats]()
    for scanned in _scan(link, PREFIX):
        blocks = [name for name in scanned if _is_block(name)]
        for start in range(0, len(blocks), at_once):
            names = blocks[start : start + at_once]
            for name, (size, reason) in zip(names, look(names), strict=False):
                space = _parts(name)[0]
                stats = spaces.setdefault(space, SpaceStats(space.decode("ascii", "replace")))
                found.bad.update([reason] if reason else [])
                stats.num_blocks += not reason
                stats.num_bytes += size
    found.spaces = sorted(spaces.values(), key=lambda stats: -stats.num_bytes)
    return found


def _scan(link: RedisLink, prefix: bytes) -> Iterator[list[bytes]]:
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
