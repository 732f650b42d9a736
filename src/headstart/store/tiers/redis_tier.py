"""RedisTier: blocks of one shape in a Redis or Valkey server, or cluster, that servers on many machines share.

It is the `StorageTier` of a `SingleTierStore`, whose threads alone talk to the server: the engine's thread reads the
dict of known blocks. That dict follows a stream in which every writer announces what it wrote, sealed like the blocks;
a block that the server has dropped since is a miss, and is forgotten. The server bounds its memory itself (maxmemory),
and every block expires a time after its last use. In a cluster blocks are spread over all nodes; one has the stream.
"""

import os
import threading
import time
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

from headstart.core.cache.block_store import BlockKey, Data
from headstart.core.cache.hashing import BlockHash
from headstart.store.format import StoredBlockFormat
from headstart.store.segment import ReadResult
from headstart.store.tiers.redis_inspect import PREFIX, clear_redis
from headstart.store.tiers.redis_link import SPARE_BYTES, RedisConnections, Value
from headstart.store.tiers.sealing import BlockSealer
from headstart.store.tiers.tier import TierError

READ_SECONDS, WRITE_SECONDS = 1.0, 5.0  # deadlines of one piece of a load, and of one run of writes
LOOK_SECONDS = 0.1  # between two looks at the index
LOOK_ENTRIES, MAX_LOOKS = 1000, 100  # entries per call, and calls per look
MAX_ENTRIES = 1 << 16  # of the index, each of which announces at most 256 blocks
MAX_KNOWN = 1 << 20  # blocks
MAX_RENEWED = 1000  # blocks per look
_HASH_BYTES, _ID_BYTES = 32, 8


class RedisTier:
    """See the module. `num_corrupt` is always 0: loads count what they find damaged."""

    max_bytes = num_segments = num_corrupt = 0

    def __init__(
        self,
        url: str,
        password: str | None,
        shape: StoredBlockFormat,
        secret: bytes,
        ttl: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`ttl`: seconds after its last use at which a block expires. Connects to nothing. Raises ConfigError."""
        self._sealer, self._ttl, self._clock = BlockSealer(secret, shape), ttl, clock
        self._block_bytes = shape.block_bytes
        self._reads, self._writes = (
            RedisConnections(url, password, seconds) for seconds in (READ_SECONDS, WRITE_SECONDS)
        )
        self._space = self._sealer.space.encode()
        self._index = b"%s%s:index" % (PREFIX, self._space)
        self._run_ids: dict[str, str] = {}  # server -> its process
        self._own_id = os.urandom(_ID_BYTES)  # of what this process announces
        self._lock = threading.Lock()  # of changes; `contains` does without
        self._known: dict[BlockHash, float] = {}  # -> when it was last written or renewed, as far as known
        self._used: set[BlockHash] = set()  # to be renewed
        self._rest = b"-"  # where the part of the index begins that is to be read
        self._look_at = float("-inf")
        self._asked: Sequence[BlockKey] | None = None  # the next piece of the same load
        self._sealed, self._received = bytearray(), bytearray()  # the values of one call of `append`, and of `read`

    @property
    def num_blocks(self) -> int:
        return len(self._known)

    @property
    def num_bytes(self) -> int:
        return len(self._known) * self._sealer.value_bytes

    def contains(self, block_hash: BlockHash) -> bool:
        return block_hash in self._known

    def read_blocks_until_miss(
        self, keys: Sequence[BlockKey], buffer: memoryview, ahead: Sequence[BlockKey] = ()
    ) -> ReadResult:
        try:
            values = self._fetch(keys)
        except TierError as error:
            return ReadResult(0, "io", error)
        if ahead:  # sent by the server while these are opened
            with suppress(TierError):
                self._ask(ahead)
        size = self._block_bytes
        missing = [key.block_hash for key, value in zip(keys, values, strict=True) if value is None]
        for done, key in enumerate(keys):
            if isinstance(error := values[done], TierError):
                return ReadResult(done, "io", error)
            value, part = values[done], buffer[done * size : (done + 1) * size]
            miss = "gone" if value is None else self._sealer.unseal_block_into(key, value, part)
            if miss is not None:
                self._forget([*missing, key.block_hash])
                return ReadResult(done, miss)
        return ReadResult(len(keys))

    def _ask(self, keys: Sequence[BlockKey]) -> None:
        self._asked = None
        self._reads.send_get_commands([self._name(key.block_hash) for key in keys])
        self._asked = keys

    def _fetch(self, keys: Sequence[BlockKey]) -> list[Value]:
        """Return the values of these blocks, valid until the next call. Raises TierError."""
        if self._asked is not keys:
            self._ask(keys)
        self._asked, most = None, self._sealer.value_bytes
        num_bytes = len(keys) * (most + 2 * SPARE_BYTES)
        if len(self._received) < num_bytes:
            self._received = bytearray(num_bytes)
        return self._reads.receive_values(len(keys), most, self._received)

    def write_new_blocks(self, blocks: Sequence[tuple[BlockKey, Data]]) -> int:
        new = {key.block_hash: (key, data) for key, data in blocks if not self.contains(key.block_hash)}
        size = self._sealer.value_bytes
        if len(self._sealed) < len(new) * size:
            self._sealed = bytearray(len(new) * size)
        values = [memoryview(self._sealed)[at : at + size] for at in range(0, len(new) * size, size)]
        for (key, data), value in zip(new.values(), values, strict=True):
            self._sealer.seal_block(key, data, value)

        writes = [("SET", self._name(h), value, "EX", self._ttl) for h, value in zip(new, values, strict=True)]
        if new:
            self._announce(list(new), writes)
        return len(new)

    def make_room(self, num_bytes: int, *, kept: Container[BlockHash]) -> int:
        """Ask whether the server is there: it evicts by itself, or refuses to write."""
        self._writes.ask_each(lambda server: server.ping())
        return 0

    def mark_used(self, block_hashes: Iterable[BlockHash]) -> None:
        """Note blocks that are to be renewed at the next look: those that were not for a quarter of their life."""
        before = self._clock() - self._ttl / 4
        self._used.update(h for h in block_hashes if self._known.get(h, float("inf")) < before)

    def refresh_from_other_writers(self) -> None:
        now = self._clock()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_SECONDS
        run_ids = self._writes.ask_each(lambda server: str(server.info("server")["run_id"]))
        restarted = {server for server, run_id in run_ids.items() if self._run_ids.get(server, run_id) != run_id}
        self._run_ids |= run_ids
        if restarted and self._writes.server_of(self._index) in restarted:  # which may have lost everything
            self._rest, self._own_id = b"-", os.urandom(_ID_BYTES)
        if len(restarted) == len(run_ids):
            self._forget(list(self._known))
        elif restarted:  # find out what is left, and announce that in case the index is lost
            self._used.update(list(self._known))
        for _ in range(MAX_LOOKS):
            (entries,) = self._writes.execute_commands(
                [("XRANGE", self._index, self._rest, "+", "COUNT", LOOK_ENTRIES)]
            )
            try:
                for entry_id, fields in entries:
                    text = self._sealer.open_message(fields.get(b"blocks"))
                    if not text.startswith(self._own_id):
                        self._learn(
                            BlockHash(text[n : n + _HASH_BYTES]) for n in range(_ID_BYTES, len(text), _HASH_BYTES)
                        )
                    self._rest = b"(" + entry_id
            except (AttributeError, IndexError, TypeError, ValueError) as error:
                raise TierError("the answer is no index") from error
            if len(entries) < LOOK_ENTRIES:
                break
        self._renew()
        self._look_at = self._clock() + LOOK_SECONDS

    def discard_blocks(self, block_hashes: Iterable[BlockHash]) -> None:
        found = list(block_hashes)
        self._forget(found)
        self._writes.execute_commands([("UNLINK", self._name(block_hash)) for block_hash in found])

    def clear(self) -> None:
        """Drop the blocks of this model and secret, for all processes."""
        self._forget(list(self._known))
        clear_redis(self._writes, self._space)

    def close(self) -> None:
        for link in (self._reads, self._writes):
            link.close()

    def _name(self, block_hash: BlockHash) -> bytes:
        return b"%s%s:b:%s" % (PREFIX, self._space, self._sealer.external_block_name(block_hash))

    def _renew(self) -> None:
        """Begin the life of used blocks anew, and announce them again, so that the index does not lose them."""
        renewed = list(islice(self._used, MAX_RENEWED))
        answers = self._writes.execute_commands(
            [("EXPIRE", self._name(block_hash), self._ttl) for block_hash in renewed]
        )
        found = [block_hash for block_hash, answer in zip(renewed, answers, strict=True) if answer]
        self._forget(set(renewed).difference(found))
        if found:
            self._announce(found, [])
        self._used.difference_update(renewed)

    def _announce(self, block_hashes: list[BlockHash], writes: list[tuple[Any, ...]]) -> None:
        """Send commands, and then one entry of the index. Raises TierError."""
        entry = self._sealer.seal_message(self._own_id + b"".join(block_hashes))
        self._writes.execute_commands(
            [*writes, ("XADD", self._index, "MAXLEN", "~", MAX_ENTRIES, "*", b"blocks", entry)]
        )
        self._learn(block_hashes)

    def _learn(self, block_hashes: Iterable[BlockHash]) -> None:
        now = self._clock()
        with self._lock:
            for block_hash in block_hashes:
                self._known.pop(block_hash, None)
                self._known[block_hash] = now
            while len(self._known) > MAX_KNOWN:
                del self._known[next(iter(self._known))]

    def _forget(self, block_hashes: Iterable[BlockHash]) -> None:
        with self._lock:
            for block_hash in block_hashes:
                self._known.pop(block_hash, None)
