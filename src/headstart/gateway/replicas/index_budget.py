"""ShadowBudget: how many blocks the shadows of all replicas may hold together, and each of them.

A shadow takes 35 bytes for a block that is empty and up to 360 for one that is not. Replicas say how many blocks they
have, and may say anything: what one of them gets is not there for the others.
"""

from headstart.http.logs import Log
from headstart.router.index.approximate_index import MAX_UNKNOWN_BLOCKS

MAX_TOTAL_BLOCKS = 2**24  # of all replicas: 6 GB when full, 0.6 GB when empty
MAX_REPLICA_BLOCKS = 2**22  # of one replica: 67 million tokens in blocks of 16
MIN_BLOCKS = 16_384  # that every replica gets, however many there are


class ShadowBudget:
    """Blocks granted to replicas, by name."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._granted: dict[str, int] = {}
        self._clamped: set[str] = set()

    def grant(self, name: str, asked: int) -> int:
        """The blocks a shadow may hold of the `asked` ones; the last grant of that name is void. 0: nobody knows."""
        self._granted.pop(name, None)
        left = max(MAX_TOTAL_BLOCKS - sum(self._granted.values()), MIN_BLOCKS)
        granted = min(asked, left, MAX_REPLICA_BLOCKS)
        if not asked and left < MAX_UNKNOWN_BLOCKS:
            granted = left
        self._granted[name] = granted or MAX_UNKNOWN_BLOCKS
        if granted >= asked:
            self._clamped.discard(name)
        elif name not in self._clamped:
            self._clamped.add(name)
            self._log.line(
                f"headstart: {name} says it has {asked} blocks; it is believed to have {granted}: "
                f"one replica may have {MAX_REPLICA_BLOCKS}, all together {MAX_TOTAL_BLOCKS}"
            )
        return granted

    def grow(self, name: str, held: int, asked: int) -> int:
        """The blocks a shadow may hold that was granted `held` and whose replica has proven to have `asked`.

        At most half of what is left goes to one: a replica that lies leaves room for those that come. A shadow that was
        granted another number is an old one, and grows no more.
        """
        if self._granted.get(name) != held:
            return held
        left = max(MAX_TOTAL_BLOCKS - sum(self._granted.values()), 0)
        self._granted[name] = max(min(asked, held + left // 2, MAX_REPLICA_BLOCKS), held)
        return self._granted[name]

    def release(self, name: str) -> None:
        """The replica is no more."""
        self._granted.pop(name, None)
        self._clamped.discard(name)
