"""Contents: what the router believes to be in one replica's prefix cache, guessed or told by KV events."""

from typing import Protocol

from headstart.core.cache.hashing import BlockHash


class Reservation:
    """What one request under way means to the contents of its replica; handed back with all that becomes of it."""

    __slots__ = (
        "blocks",
        "doubtful",
        "epoch",
        "evicted",
        "guess",
        "hit",
        "names",
        "num_losses",
        "reported",
        "serials",
        "sure",
    )

    def __init__(self, names: list[BlockHash], hit: int) -> None:
        self.names = names
        self.hit = hit  # blocks believed to be cached when it was sent
        self.sure = hit  # of them those that are there unless they were evicted: not still to be computed by another
        self.blocks: list[int] = []  # of the shadow's pool
        self.serials: list[int] = []  # when the blocks of the hit had been seen last
        self.evicted = False  # the first block behind the hit was there once, and had to go
        self.doubtful = False  # it was forgotten when the cache was thought to be emptied, and may be there
        self.num_losses = 0  # noticed before it was sent
        self.guess: Reservation | None = None  # of contents that are guessed beside those that are told
        self.reported = False
        self.epoch = 0


class PrefixIndex(Protocol):
    """The cache of one replica. Names are those of a prompt's full blocks, from the first on."""

    def match(self, names: list[BlockHash], now: float) -> int:
        """How many leading blocks are believed to be there. Changes nothing that a caller could see."""
        ...

    def sent(self, names: list[BlockHash], now: float) -> Reservation:
        """A request is on its way to the replica."""
        ...

    def computed(self, hold: Reservation, now: float) -> None:
        """Its first token is there: its prompt is computed."""
        ...

    def finished(self, hold: Reservation, names: list[BlockHash], now: float) -> None:
        """It has ended well; `names` go on with what it generated, where that is known."""
        ...

    def failed(self, hold: Reservation) -> None:
        """It has ended, and nobody knows what was computed of it."""
        ...

    def observed(self, hold: Reservation, num_blocks: int, now: float) -> None:
        """The replica says how many of its leading blocks were really cached."""
        ...

    def loss(self, num_blocks: int) -> float:
        """How many of the blocks that have to go for so many new ones somebody should want again. Changes nothing."""
        ...

    def clear(self) -> None:
        """The replica's cache is empty now."""
        ...
