"""Admission and eviction of a tier by value, beside least recently used: recorded block sequences, no model, no clock.

    python benchmarks/headline/tier_policies.py --traces shared/traces >tier_policies.json

A pool (least recently used) of 5 % of the distinct blocks, and a tier behind it that gets every new block. A prompt
finds its leading blocks that either has; the rest is computed. Policies of the tier:

- `lru`: blocks, the deepest of a chain first; the simulator's.
- `store`: files, the least recently used first; of its blocks those used since they were written are written again, the
  most recently used first, up to half a file, but not the oldest fifth of all used ones. The store's.
- `head first`: the same without the fifth, in the order of the slots, and a chain's head counts as used before its
  tail: the store's until 28 November 2026. `segments`: the tail before the head.
- `recent files`: the file with the fewest blocks above a quantile of the last uses goes first; these are written again.
- `hits`: the leaf with the lowest probability of a use per time in the tier goes first, and a new block that has it is
  not written. Learned online by the number of uses, the number of new blocks of the last prompt, and age, as
  `core/cache/hit_density.py` does, blocks that have left included; of `SAMPLE` leaves (LHD, Beckmann, NSDI 2018).
- `value`: the same, times the seconds of computing the block, which grow with its depth.
- `value files`: as `recent files`, by what `hits` learns.
- `exclusive`: `lru`, but blocks are written when they leave the pool; what is loaded leaves the tier.
- `folder`: not a model of the store, but its own code on a folder (only if it is named).
- `bound`: Belady's policy on one cache of pool and tier.

Traces are cut into two halves of whole sessions (Mooncake: by the second block): constants were chosen on the first,
the figures of both are in the JSON. The last line of stdout is JSON.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from headstart.core.cache.block_store import BlockKey
from headstart.core.cache.hashing import BlockHash
from headstart.measurement.machine import describe_machine, describe_versions
from headstart.store import catalog
from headstart.store.catalog import SegmentCatalog
from headstart.store.files import FileSystemCalls
from headstart.store.format import SegmentHeader, StoredBlockFormat
from headstart.workload.belady import belady_hit_blocks_per_request, infinite_cache_hits
from headstart.workload.block_paths import overlap_sessions, trace_block_paths
from headstart.workload.recorded.trace_files import read_trace_path
from headstart.workload.recorded.trace_units import TraceUnits

PER_TOKEN, PER_PAIR = 62.8e-6, 1.5e-9  # seconds: of the simulator's profile `reference`
SAMPLE = 64
EPOCHS, REMEMBERED = 16, 8  # per tier; tiers in blocks for which a use is remembered
USES, SIZES = 6, 8
DECAY, SHARED, OWN = 0.99, 256.0, 64.0
STALE_SHARE = 0.2
SEGMENTS = 128  # per tier
QUANTILES = {True: 0.1, False: 0.3}  # of learned values and of last uses in the tier: blocks above are written again
POLICIES = ("lru", "head first", "segments", "store", "recent files", "value files", "hits", "value", "exclusive")


@dataclass
class Chains:
    """Prompts as chains of blocks."""

    name: str
    block_tokens: int
    paths: list[list[int]]
    num_distinct: int = 0
    parents: dict[int, int] = field(default_factory=dict)
    depths: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for path in self.paths:
            for depth, block in enumerate(path):
                self.parents[block], self.depths[block] = (path[depth - 1] if depth else -1), depth
        self.num_distinct = len(self.depths)

    def seconds(self, depth: int) -> float:
        """Return the seconds of computing the block behind so many."""
        return self.block_tokens * (PER_TOKEN + PER_PAIR * (depth + 0.5) * self.block_tokens)


class LeastRecentlyUsed:
    """A tier of blocks; `num_written` counts them."""

    def __init__(self, chains: Chains, size: int, *, exclusive: bool = False) -> None:
        self.chains, self.size, self.exclusive, self.num_written = chains, size, exclusive, 0
        self.blocks: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self.blocks

    def use(self, path: Sequence[int], num_new: int) -> None:
        """Mark the blocks that a prompt found as used; it is to compute `num_new`."""
        for block in reversed(path):
            if block in self.blocks:
                if self.exclusive:
                    del self.blocks[block]
                else:
                    self.blocks.move_to_end(block)

    def offer(self, block: int) -> None:
        """Write a block that is not in the tier."""
        self.num_written += 1
        self.blocks[block] = None
        while len(self.blocks) > self.size:
            self.blocks.popitem(last=False)


class ReuseTimes:
    """Hits per epoch of a block by its class and age; blocks that have left are counted for `REMEMBERED` tiers."""

    def __init__(self, size: int) -> None:
        self.epoch, self._ticks, self._per_epoch = 0, 0, max(size // EPOCHS, 1)
        self.oldest = REMEMBERED * EPOCHS
        widths: list[int] = []
        while sum(widths) <= self.oldest:
            widths.append(1 << len(widths) // 4)
        self.buckets = [at for at, width in enumerate(widths) for _ in range(width)]
        self._widths = widths
        num, classes = len(widths), (USES + 1) * SIZES
        self._reuses = [[0.0] * num for _ in range(classes)]
        self._exposure = [[0.0] * num for _ in range(classes)]
        self._values = [[1.0] * num for _ in range(classes)]
        self._at_risk: Counter[tuple[int, int]] = Counter()
        self._state: dict[int, tuple[int, int, int]] = {}  # block -> epoch of the last use, class, uses

    def use(self, blocks: Iterable[int], num_new: int, *, is_new: bool) -> None:
        """Record a use by a prompt with so many new blocks, or that they are new."""
        size = min(num_new.bit_length(), SIZES - 1)
        for block in blocks:
            epoch, kind, uses = self._state.get(block, (0, -1, 0))
            if kind >= 0 and self.epoch - epoch <= self.oldest:
                self._reuses[kind][self.buckets[self.epoch - epoch]] += 1
                self._at_risk[epoch, kind] -= 1
                uses = min(uses + 1, USES)
            kind = uses * SIZES + size
            self._state[block] = (self.epoch, kind, uses)
            self._at_risk[self.epoch, kind] += 1
            self._ticks += is_new
        while self._ticks >= self._per_epoch:
            self._ticks -= self._per_epoch
            self._end_epoch()

    def value(self, block: int) -> float:
        """Return the expected uses per epoch."""
        epoch, kind, _ = self._state[block]
        return self._values[kind][self.buckets[min(self.epoch - epoch, self.oldest)]]

    def _end_epoch(self) -> None:
        for key, count in list(self._at_risk.items()):
            epoch, kind = key
            if not count or self.epoch - epoch > self.oldest:
                del self._at_risk[key]
            else:
                self._exposure[kind][self.buckets[self.epoch - epoch]] += count
        self.epoch += 1
        reuses = [sum(column) for column in zip(*self._reuses, strict=True)]
        exposure = [sum(column) for column in zip(*self._exposure, strict=True)]
        mean = (sum(reuses) + 1) / (sum(exposure) + SHARED)
        common = [min((r + mean * SHARED) / (e + SHARED), 1.0) for r, e in zip(reuses, exposure, strict=True)]
        usual = self._densities(common)
        for kind, (mine, time_) in enumerate(zip(self._reuses, self._exposure, strict=True)):
            if not any(time_):
                self._values[kind] = usual
                continue
            expected = sum(map(float.__mul__, time_, common))
            factor = (sum(mine) + SHARED * mean) / (expected + SHARED * mean)
            parts = zip(mine, time_, common, strict=True)
            self._values[kind] = self._densities([min((m + OWN * factor * c) / (t + OWN), 1.0) for m, t, c in parts])
        for table in (self._reuses, self._exposure):
            for row in table:
                row[:] = [DECAY * value for value in row]

    def _densities(self, hazards: Sequence[float]) -> list[float]:
        """As `hit_densities` of `core/cache/hit_density.py`, with these widths."""
        found, stretches = [0.0] * len(hazards), list[tuple[float, float, float]]()
        for age in range(len(hazards) - 1, -1, -1):
            hazard, width = hazards[age], self._widths[age]
            left = (1.0 - hazard) ** width
            reuses, time_ = 1.0 - left, (1.0 - left) / hazard if hazard > 1e-9 else float(width)
            while stretches and stretches[-1][0] * time_ > reuses * stretches[-1][1]:
                more, longer, rest = stretches.pop()
                reuses, time_, left = reuses + left * more, time_ + left * longer, left * rest
            stretches.append((reuses, time_, left))
            found[age] = reuses / time_
        return found


class Valued:
    """A tier of blocks that drops the leaf of the lowest value, or does not write it."""

    def __init__(self, chains: Chains, size: int, *, seconds: bool) -> None:
        self.chains, self.size, self.num_written, self.times = chains, size, 0, ReuseTimes(size)
        self._weighs, self._rng = seconds, Random(1)
        self._children: dict[int, int] = {}  # blocks in the tier -> those behind them
        self._leaves: list[int] = []
        self._places: dict[int, int] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._children

    def use(self, path: Sequence[int], num_new: int) -> None:
        self.times.use(path, num_new, is_new=False)
        self._num_new = num_new

    def offer(self, block: int) -> None:
        self.times.use([block], self._num_new, is_new=True)
        parent = self.chains.parents[block]
        if parent >= 0 and parent not in self._children:
            return
        self._children[block] = 0
        self._add_leaf(block)
        if parent >= 0:
            self._children[parent] += 1
            self._remove_leaf(parent)
        self.num_written += 1
        if len(self._children) > self.size:
            victim = min(self._sample(block), key=self.value)
            self.num_written -= victim == block
            self._drop(victim)

    def value(self, block: int) -> float:
        return self.times.value(block) * (self.chains.seconds(self.chains.depths[block]) if self._weighs else 1)

    def _sample(self, block: int) -> list[int]:
        if len(self._leaves) <= SAMPLE:
            return self._leaves
        return [self._leaves[int(self._rng.random() * len(self._leaves))] for _ in range(SAMPLE)] + [block]

    def _drop(self, block: int) -> None:
        self._remove_leaf(block)
        del self._children[block]
        parent = self.chains.parents[block]
        if parent >= 0:
            self._children[parent] -= 1
            if not self._children[parent]:
                self._add_leaf(parent)

    def _add_leaf(self, block: int) -> None:
        self._places[block] = len(self._leaves)
        self._leaves.append(block)

    def _remove_leaf(self, block: int) -> None:
        place = self._places.pop(block, None)
        if place is not None:
            last = self._leaves.pop()
            if last != block:
                self._leaves[place] = last
                self._places[last] = place


class Segments:
    """A tier of files with one writer. The file of the oldest use goes first, its used blocks are written again."""

    def __init__(self, chains: Chains, size: int, *, tail_first: bool = True) -> None:
        self.chains, self.size, self.num_written, self.tail_first = chains, size, 0, tail_first
        self.slots = max(size // SEGMENTS, 4)
        self._most = max(size // self.slots, 2)
        self._files: OrderedDict[int, list[int]] = OrderedDict()  # in the order of the last use
        self._number, self._own = 0, -1
        self._where: dict[int, int] = {}
        self._used: set[int] = set()

    def __contains__(self, block: int) -> bool:
        return block in self._where

    def use(self, path: Sequence[int], num_new: int) -> None:
        for block in reversed(path) if self.tail_first else path:
            if (number := self._where.get(block)) is not None:
                self._used.add(block)
                self._files.move_to_end(number)

    def offer(self, block: int) -> None:
        self._write(block)

    def _write(self, block: int) -> None:
        if self._own < 0 or len(self._files[self._own]) >= self.slots:
            self._number += 1
            self._own = self._number
            self._files[self._own] = []
            while len(self._files) > self._most:
                self._evict()
        self.num_written += 1
        self._files[self._own].append(block)
        self._where[block] = self._own
        self._used.discard(block)

    def _evict(self) -> None:
        victim, moved = self._choose([number for number in self._files if number != self._own])
        moved = moved[: self.slots // 2]
        for block in self._live(victim):
            if block not in moved:
                del self._where[block]
        del self._files[victim]
        for block in moved:
            self._write(block)

    def _choose(self, others: list[int]) -> tuple[int, list[int]]:
        """Return the file that goes, and its blocks that are written again, as far as they fit."""
        return others[0], [block for block in self._live(others[0]) if block in self._used]

    def _live(self, number: int) -> list[int]:
        return [block for block in self._files[number] if self._where.get(block) == number]


class RecentSegments(Segments):
    """Of the file that goes, used blocks are written again unless their last use is among the oldest of used blocks."""

    def __init__(self, chains: Chains, size: int) -> None:
        super().__init__(chains, size)
        self._last: dict[int, int] = {}
        self._now = 0

    def use(self, path: Sequence[int], num_new: int) -> None:
        super().use(path, num_new)
        for block in reversed(path):
            self._now += 1
            self._last[block] = self._now

    def _choose(self, others: list[int]) -> tuple[int, list[int]]:
        uses = sorted(self._last[block] for block in self._used if block in self._where)
        oldest = uses[int(STALE_SHARE * len(uses))] if uses else 0
        moved = [block for block in self._live(others[0]) if block in self._used and self._last[block] >= oldest]
        return others[0], sorted(moved, key=lambda block: -self._last[block])


class ValuedSegments(Segments):
    """A tier of files that drops the file with the least of value; of it, blocks above a quantile are written again.

    The value is learned, or the time of the last use.
    """

    def __init__(self, chains: Chains, size: int, *, learns: bool) -> None:
        super().__init__(chains, size)
        self.times, self._learns = ReuseTimes(size), learns
        self._last: dict[int, int] = {}
        self._now = self._num_new = 0

    def use(self, path: Sequence[int], num_new: int) -> None:
        self._num_new = num_new
        self._record(path[::-1], is_new=False)

    def offer(self, block: int) -> None:
        self._record([block], is_new=True)
        self._write(block)

    def _record(self, blocks: Sequence[int], *, is_new: bool) -> None:
        if self._learns:
            self.times.use(blocks, self._num_new, is_new=is_new)
        for block in blocks:
            self._now += 1
            self._last[block] = self._now - self.chains.depths[block] * is_new

    def _choose(self, others: list[int]) -> tuple[int, list[int]]:
        values = self._values() if self._learns else {block: self._last[block] for block in self._where}
        order = sorted(values.values())
        threshold = order[int(QUANTILES[self._learns] * len(order))] if order else 0.0

        def score(number: int) -> tuple[float, float]:
            live = [values[block] for block in self._live(number)]
            return sum(min(v, threshold) for v in live) if self._learns else sum(v > threshold for v in live), sum(live)

        victim = min(others, key=score)
        moved = [block for block in self._live(victim) if values[block] > threshold]
        return victim, sorted(moved, key=lambda block: (-values[block], self.chains.depths[block]))

    def _values(self) -> dict[int, float]:
        """Return the value of all blocks in the tier; 0: one before it is missing. A tail has less than its head."""
        found: dict[int, float] = {-1: 1.0}
        for block in sorted(self._where, key=self.chains.depths.__getitem__):
            value = self.times.value(block) * (1 - 1e-6 * self.chains.depths[block])
            found[block] = value if found.get(self.chains.parents[block]) else 0.0
        del found[-1]
        return found


class RealFolder:
    """The store's own catalog on a folder of real files, with blocks of 64 bytes, in virtual time: 1 s per prompt."""

    def __init__(self, chains: Chains, size: int) -> None:
        self.chains, self.num_written = chains, 0
        self._temporary = tempfile.TemporaryDirectory(prefix="headstart-tier-")
        self._files = VirtualFiles()
        shape = StoredBlockFormat(bytes(32), 16, 64)
        slots = max(size // SEGMENTS, 4)
        one = SegmentHeader(shape, 1, bytes(8)).file_bytes
        catalog.MIN_SEGMENT_BYTES = one + slots * (shape.block_bytes + shape.table_entry_bytes)
        num_bytes = (size // slots + 1) * SegmentHeader(shape, slots, bytes(8)).file_bytes
        folder = Path(self._temporary.name) / "kv"
        self._catalog = SegmentCatalog(folder, shape, num_bytes, self._files, lambda: self._files.seconds)
        self._catalog.refresh_from_other_writers()
        write = self._catalog._eviction._write
        self._catalog._eviction._write = lambda blocks: (self._count(len(blocks)), write(blocks))[1]

    def __contains__(self, block: int) -> bool:
        return self._catalog.contains(self._key(block).block_hash)

    def use(self, path: Sequence[int], num_new: int) -> None:
        self._files.seconds += 2.0
        self._catalog.mark_used([self._key(block).block_hash for block in path])

    def offer(self, block: int) -> None:
        self._catalog.make_room(64, kept=())
        self._count(self._catalog.write_new_blocks([(self._key(block), bytes(64))]))
        if self._catalog._writer is not None:
            self._files.touch(self._catalog._writer.path)

    def _count(self, num: int) -> None:
        self.num_written += num

    def _key(self, block: int) -> BlockKey:
        return BlockKey(BlockHash(block.to_bytes(32, "little", signed=True)), BlockHash(bytes(32)), bytes(64))


class VirtualFiles(FileSystemCalls):
    """File times that advance as the replay does, in the order of the calls."""

    def __init__(self) -> None:
        self.seconds, self._num_touches = time.time(), 0

    def mtime_clock_now(self) -> float:
        return self.seconds

    def touch(self, path: Path) -> None:
        self._num_touches += 1
        nanoseconds = int(self.seconds) * 10**9 + self._num_touches % 10**6 * 1000
        os.utime(path, ns=(nanoseconds, nanoseconds))


Tier = LeastRecentlyUsed | Valued | Segments | RealFolder


def tier_of(policy: str, chains: Chains, size: int) -> Tier:
    match policy:
        case "segments" | "head first":
            return Segments(chains, size, tail_first=policy == "segments")
        case "folder":
            return RealFolder(chains, size)
        case "store":
            return RecentSegments(chains, size)
        case "value files" | "recent files":
            return ValuedSegments(chains, size, learns=policy == "value files")
        case "hits" | "value":
            return Valued(chains, size, seconds=policy == "value")
        case _:
            return LeastRecentlyUsed(chains, size, exclusive=policy == "exclusive")


def replay(chains: Chains, policy: str, pool_size: int, tier_size: int) -> tuple[list[int], int]:
    """Return the number of leading blocks that each prompt found, and of blocks written to the tier."""
    pool: OrderedDict[int, None] = OrderedDict()
    tier, hits = tier_of(policy, chains, tier_size), list[int]()
    for path in chains.paths:
        num = next((at for at, block in enumerate(path) if block not in pool and block not in tier), len(path))
        hits.append(num)
        tier.use(path[:num], len(path) - num)
        for block in reversed(path):
            pool[block] = None
            pool.move_to_end(block)
        if policy != "exclusive":
            for block in path[num:]:
                if block not in tier:
                    tier.offer(block)
        while len(pool) > pool_size:
            block, _ = pool.popitem(last=False)
            if policy == "exclusive":
                tier.offer(block)
    return hits, tier.num_written


def measure(
    chains: Chains, share: float, policies: Iterable[str], sizes: tuple[int, int] | None = None
) -> dict[str, object]:
    """Return figures of each policy with a tier of this share of the distinct blocks."""
    pool, tier = sizes or (int(0.05 * chains.num_distinct), int(share * chains.num_distinct))
    total = sum(map(len, chains.paths))
    least = total - sum(infinite_cache_hits(chains.paths))
    found: dict[str, object] = {"trace": chains.name, "requests": len(chains.paths), "distinct": chains.num_distinct}
    found |= {"pool": pool, "tier": tier, "blocks": total, "least": least}
    bound = total - sum(belady_hit_blocks_per_request(chains.paths, pool + tier))
    found["bound"] = {"hits": 1 - bound / total, "redundancy": bound / least}
    for policy in policies:
        began = time.process_time()
        hits, written = replay(chains, policy, pool, tier)
        computed = total - sum(hits)
        seconds = sum(
            sum(chains.seconds(depth) for depth in range(num, len(path)))
            for num, path in zip(hits, chains.paths, strict=True)
        )
        found[policy] = {"hits": 1 - computed / total, "redundancy": computed / least, "computed": computed}
        found[policy] |= {"seconds": seconds, "written": written, "written_per_new": written / computed}
        found[policy] |= {"cpu_seconds": round(time.process_time() - began, 1)}
        print(chains.name, share, policy, {k: round(v, 4) for k, v in found[policy].items()}, file=sys.stderr)
    return found


def halves(name: str, path: Path, at_once: int, tokens: int) -> list[Chains]:
    """Return the prompts of each half of a trace in blocks of at least so many tokens."""
    trace = read_trace_path(path, TraceUnits()).up_to_length(200_000)
    if at_once:
        trace = overlap_sessions(trace, at_once)
    prompts = trace_block_paths(trace)
    step = max(tokens // prompts.block_size, 1)
    cut = [[ids[at] for at in range(step - 1, len(ids), step)] for ids in prompts.paths]
    roots = list(dict.fromkeys(one.root_session for one in trace.requests))
    parity = {root: place % 2 for place, root in enumerate(roots)}
    found: list[Chains] = []
    for half in (0, 1):
        if at_once:
            kept = [ids for ids, one in zip(cut, trace.requests, strict=True) if parity[one.root_session] == half]
        else:
            kept = [ids for ids in cut if len(ids) > 1 and ids[1] % 2 == half]
        found.append(Chains(f"{name}/{half}", step * prompts.block_size, [ids for ids in kept if ids]))
    return found


def scan(half: int, tier: int = 1000) -> Chains:
    """Ten prompts of 20 blocks that come back after one-off prompts of six times the tier; as many of each."""
    rng, number, paths = Random(half), 10_000_000, list[list[int]]()
    kept = [[1000 * one + at for at in range(20)] for one in range(10)]
    for _ in range(12):
        for path in kept:
            paths.append(path)
            for _ in range(6 * tier // 10 // 20):
                length = rng.randint(10, 30)
                paths.append(list(range(number, number + length)))
                number += length
    return Chains(f"scan/{half}", 512, paths)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", default=["agentx", "mooncake", "miniswe", "scan"])
    parser.add_argument("--policies", nargs="+", choices=(*POLICIES, "folder"), default=list(POLICIES))
    parser.add_argument("--halves", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--shares", nargs="+", type=float, default=[0.15, 0.4])
    options = parser.parse_args()
    rows: list[dict[str, object]] = []
    for name, file, at_once, tokens in (
        ("agentx", "agentx", 32, 512),
        ("mooncake", "mooncake_conversation_trace.jsonl", 0, 512),
        ("miniswe", "agent_miniswe.jsonl", 8, 64),
    ):
        if name in options.parts:
            both = halves(name, options.traces / file, at_once, tokens)
            rows += [
                measure(both[half], share, options.policies) for half in options.halves for share in options.shares
            ]
    if "scan" in options.parts:
        rows += [measure(scan(half), 0.0, options.policies, (100, 1000)) for half in options.halves]
    document = {"benchmark": "tier_policies", "rows": rows, "machine": describe_machine()}
    print(json.dumps(document | {"versions": describe_versions()}))


if __name__ == "__main__":
    main()
