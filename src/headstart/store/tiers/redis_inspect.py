"""Inspection of the blocks in Redis, without their secret.

Keys: headstart:kv:SPACE:b:NAME is a sealed block, headstart:kv:SPACE:index the stream that announces blocks; SPACE is
one secret, model and block size.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from headstart.store.tiers.redis_link import RedisConnections
from headstart.store.tiers.sealing import damage_of_value
from headstart.store.tiers.tier import parse_tier_places

PREFIX = b"headstart:kv:"
INSPECT_SECONDS = 30.0
SCAN_COUNT, READ_COUNT = 1000, 16  # keys per call


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


def open_inspection_link(url: str, password: str | None) -> RedisConnections:
    """Return a link for the functions below. Raises ConfigError."""
    return RedisConnections(parse_tier_places(url).url or url, password, INSPECT_SECONDS)


def stat_redis(link: RedisConnections) -> RedisStats:
    """Count the blocks of all spaces. Raises TierError."""

    def sizes(names: list[bytes]) -> list[tuple[int, str]]:
        return [(int(size), "") for size in link.execute_commands([("STRLEN", name) for name in names])]

    return _survey(link, SCAN_COUNT, sizes)


def verify_redis(link: RedisConnections) -> RedisStats:
    """Read every value and check it as far as that is possible without its secret. Raises TierError."""

    def checked(names: list[bytes]) -> list[tuple[int, str]]:
        pairs = zip(names, link.execute_commands([("GET", name) for name in names]), strict=True)
        return [(len(value), damage_of_value(value, _parts(name)[1])) for name, value in pairs if value is not None]

    return _survey(link, READ_COUNT, checked)


def clear_redis(link: RedisConnections, space: bytes = b"") -> int:
    """Delete all blocks, or those of one space, and their indexes. Return the number of blocks. Raises TierError."""
    num_blocks = 0
    for names in _scan(link, PREFIX + space):
        num_blocks += sum(_is_block(name) for name in names)
        link.execute_commands([("UNLINK", name) for name in names])
    return num_blocks


def _survey(link: RedisConnections, at_once: int, look: Callable[[list[bytes]], list[tuple[int, str]]]) -> RedisStats:
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


def _scan(link: RedisConnections, prefix: bytes) -> Iterator[list[bytes]]:
    """Yield the keys with a prefix, in portions; one may come twice while others write."""
    for server in link.servers().values():
        cursor: Any = None
        while cursor != 0:
            answer: Any = link.run_with_deadline(partial(server.scan, cursor or 0, prefix + b"*", SCAN_COUNT))
            cursor, names = answer
            if names := [name for name in names if name.startswith(prefix)]:
                yield names


def _parts(name: bytes) -> tuple[bytes, bytes]:
    """Return the space and the name of a block."""
    space, _, rest = name[len(PREFIX) :].partition(b":")
    return space, rest.removeprefix(b"b:")


def _is_block(name: bytes) -> bool:
    return name[len(PREFIX) :].partition(b":")[2].startswith(b"b:")
