"""Does eviction by learned pauses of sessions find more than lru, 2q and lhd? Coding agents, without a model.

    PYTHONPATH=src:lab/src python benchmarks/eviction/pauses.py --sessions FOLDER --seeds 1 >pauses.json

`pauses` knows which session a prompt belongs to, and the time. It learns online how long sessions pause, and evicts the
blocks with the least expected uses per second: the Gittins index of the time since their last use, of blocks in the
last prompt of their session and of others apart. Its form was chosen on the sessions of `--half tuned`; the other half
is held out. Each session comes twice, with ids of its own, in an order by seed, `at_once` of them at a time with the
recorded pauses. One request at a time, as in eviction_replay.py.

Pools are shares of what the sessions at a time need: the mean length of a prompt times their number. Blocks are 32
recorded ones, 2,048 tokens. The last line of stdout is one JSON document.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

from headstart.measurement.machine import print_figures_with_machine
from headstart.workload.belady import belady_hit_blocks_per_request, infinite_cache_hits
from headstart.workload.block_paths import BlockPaths, overlap_sessions
from headstart.workload.recorded.trace_files import TraceOptions
from headstart.workload.traces import Trace
from headstart_lab.cache.eviction_replay import replay

AT_ONCE, POOLS = (8, 32), (5, 10, 20, 50)  # sessions; per cent of what they need
COPIES = 2
COARSER = 32  # recorded blocks of a block here
WIDTHS = [2.0**power for power in range(-1, 15)]  # seconds of the age buckets: doubled, to 9 hours
EDGES = list(accumulate(WIDTHS))
PRIOR = 2.0  # weight of the common hazard, in returns
POLICIES = ("lru", "2q", "lhd")
CURRENT, FORMER = 0, 1


class Pauses:
    """The hazard of reuse by the time since the last use, learned from all sessions of one tenant.

    Of the current prompts of sessions it learns from all pauses, evicted or not, and from those that have not ended;
    of former prompts from blocks while they are cached.
    """

    def __init__(self) -> None:
        self.returns = [[0.0] * len(WIDTHS) for _ in range(2)]
        self.exposure = [[0.0] * len(WIDTHS) for _ in range(2)]  # seconds
        self.values = [[1.0 / width for width in WIDTHS], [0.5 / width for width in WIDTHS]]
        self.idle: dict[str, float] = {}  # session -> end of its last answer
        self._stale = 0

    def session_returns(self, session: str, now: float, end: float) -> None:
        """Record a request of a session, and when its answer ends."""
        if session in self.idle:
            self.saw(CURRENT, max(now - self.idle[session], 0.0), 1.0, is_return=True)
        self.idle[session] = end
        self._stale += 1
        if self._stale >= 8:
            self._learn(now)

    def saw(self, kind: int, age: float, weight: float, is_return: bool) -> None:
        """Record idle blocks: their time until now, and whether it ended by a use."""
        _spend(self.exposure[kind], age, weight)
        if is_return:
            self.returns[kind][_bucket(age)] += weight

    def value(self, kind: int, age: float) -> float:
        """Return expected uses per second."""
        return self.values[kind][_bucket(age)]

    def _learn(self, now: float) -> None:
        self._stale = 0
        for kind in range(2):
            returns, exposure = self.returns[kind], list(self.exposure[kind])
            for end in self.idle.values() if kind == CURRENT else ():
                _spend(exposure, max(now - end, 0.0), 1.0)
            mean = (sum(returns) + 1e-6) / (sum(exposure) + 1.0)
            stretches: list[tuple[float, float, float]] = []
            for age in range(len(WIDTHS) - 1, -1, -1):
                weight = PRIOR / (mean + 1.0 / WIDTHS[age])
                hazard = (returns[age] + weight * mean) / (exposure[age] + weight)
                left = math.exp(-hazard * WIDTHS[age])
                used, time = 1.0 - left, (1.0 - left) / hazard
                while stretches and stretches[-1][0] * time > used * stretches[-1][1]:
                    more, longer, rest = stretches.pop()
                    used, time, left = used + left * more, time + left * longer, left * rest
                stretches.append((used, time, left))
                self.values[kind][age] = used / time


def _bucket(age: float) -> int:
    return next((bucket for bucket, edge in enumerate(EDGES) if age <= edge), len(EDGES) - 1)


def _spend(exposure: list[float], age: float, weight: float) -> None:
    """Add a time from 0 to `age` to the buckets that it passed."""
    for bucket, width in enumerate(WIDTHS):
        exposure[bucket] += weight * min(age, width)
        if age <= width:
            return
        age -= width


class Group:
    """Cached blocks of one session that were last used at the same time, heads first."""

    __slots__ = ("blocks", "kind", "since")

    def __init__(self, blocks: dict[int, None], since: float) -> None:
        self.blocks, self.since, self.kind = blocks, since, CURRENT


def replay_pauses(requests: Sequence[tuple[str, float, float, Sequence[int]]], num_blocks: int) -> list[int]:
    """Return the leading blocks of each request found. `requests`: session, start, end, path; in order of starts."""
    pauses, hits = Pauses(), list[int]()
    groups: dict[int, Group] = {}  # by block
    live: dict[Group, None] = {}
    last: dict[str, Group] = {}
    for session, now, end, whole in requests:
        path = whole[:num_blocks]
        pauses.session_returns(session, now, end)
        num_hits = next((depth for depth, block in enumerate(path) if block not in groups), len(path))
        hits.append(num_hits)
        used: dict[Group, int] = {}
        for block in path[:num_hits]:
            group = groups.pop(block)
            del group.blocks[block]
            used[group] = used.get(group, 0) + 1
        for group, count in used.items():
            if group.kind == FORMER:
                pauses.saw(FORMER, max(now - group.since, 0.0), count / len(path), is_return=True)
        for block in path[num_hits:]:  # behind a block that was evicted: not reachable, and computed again
            if (group := groups.pop(block, None)) is not None:
                del group.blocks[block]
        for group in [group for group in live if not group.blocks]:
            del live[group]
        if (former := last.get(session)) is not None and former in live:
            former.kind, former.since = FORMER, now
        _evict(pauses, live, groups, len(groups) + len(path) - num_blocks, now)
        group = last[session] = Group(dict.fromkeys(path), end)
        live[group] = None
        groups.update(dict.fromkeys(path, group))
    return hits


def _evict(pauses: Pauses, live: dict[Group, None], groups: dict[int, Group], num: int, now: float) -> None:
    while num > 0:
        group = min(live, key=lambda one: (pauses.value(one.kind, max(now - one.since, 0.0)), one.since))
        first = len(group.blocks)
        while group.blocks and num > 0:
            block, _ = group.blocks.popitem()
            del groups[block]
            num -= 1
        if group.kind == FORMER:
            pauses.saw(FORMER, max(now - group.since, 0.0), (first - len(group.blocks)) / first, is_return=False)
        if not group.blocks:
            del live[group]


def chosen(trace: Trace, half: str, seed: int) -> Trace:
    """Return every second session, each COPIES times, in an order by seed."""
    names = sorted({one.root_session for one in trace.requests})[half == "tuned" :: 2]
    rounds = [(name, copy) for copy in range(COPIES) for name in Random(f"{seed}/{copy}").sample(names, len(names))]
    first = {name: min(one.at for one in trace.requests if one.root_session == name) for name in names}
    by_name = {name: [one for one in trace.requests if one.root_session == name] for name in names}
    found: list[Any] = []
    for place, (name, copy) in enumerate(rounds):
        for one in by_name[name]:
            ids = [block * COPIES + copy for block in list(one.hash_ids)[COARSER - 1 : one.length // 64 : COARSER]]
            number = one.number * COPIES + copy
            after = tuple(before * COPIES + copy for before in one.after)
            session = f"{one.session}#{copy}"
            parent = f"{one.parent}#{copy}" if one.parent else ""
            at = one.at - first[name] + place * 1e-6
            found.append(
                replace(one, at=at, hash_ids=tuple(ids), number=number, after=after, session=session, parent=parent)
            )
    found.sort(key=lambda one: one.at)
    order = {f"{name}#{copy}": place for place, (name, copy) in enumerate(rounds)}
    found.sort(key=lambda one: (order[one.root], one.at))
    return replace(trace, requests=tuple(found), block_size=64 * COARSER)


def ends_of(trace: Trace) -> dict[int, float]:
    """Return when each request's answer ended: a pause before the first that comes after it."""
    found: dict[int, float] = {}
    for one in trace.requests:
        for before in one.after:
            found[before] = min(found.get(before, one.at), one.at - one.pause)
    return found


def cell(trace: Trace, at_once: int, pool_percent: int) -> dict[str, Any]:
    """Return the hits of all policies as shares of the blocks of all prompts."""
    mixed = overlap_sessions(trace, at_once)
    ends = ends_of(mixed)
    rows = [one for one in mixed.requests if one.hash_ids]
    paths = [list(one.hash_ids) for one in rows]
    need = at_once * sum(map(len, paths)) // len(paths)
    num_blocks = max(need * pool_percent // 100, 1)
    total = sum(map(len, paths))
    prompts = BlockPaths(trace.block_size, paths, [one.length for one in rows])
    timed = [
        (one.session, one.at, max(ends.get(one.number, one.at), one.at), path)
        for one, path in zip(rows, paths, strict=True)
    ]
    found: dict[str, int] = {policy: sum(replay(prompts, policy, num_blocks)) for policy in POLICIES}
    found["pauses"] = sum(replay_pauses(timed, num_blocks))
    found["belady"] = sum(belady_hit_blocks_per_request(paths, num_blocks))
    found["infinite"] = sum(infinite_cache_hits(paths))
    assert all(value <= found["belady"] for name, value in found.items() if name != "infinite"), found
    shares = {name: round(value / total, 4) for name, value in found.items()}
    return {"at_once": at_once, "pool_percent": pool_percent, "pool_blocks": num_blocks, "requests": len(rows)} | shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=Path, required=True)
    parser.add_argument("--half", choices=("tuned", "held-out"), default="held-out")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", type=int, default=0, help="sessions at a time")
    args = parser.parse_args()
    trace = TraceOptions().read(args.sessions)
    rows: list[dict[str, Any]] = []
    for seed in range(args.seeds):
        picked = chosen(trace, args.half, seed)
        for at_once in [args.only] if args.only else AT_ONCE:
            for pool in POOLS:
                rows.append({"seed": seed, **cell(picked, at_once, pool)})
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    print_figures_with_machine(
        {"bench": "learned pauses", "half": args.half, "block_tokens": 64 * COARSER, "rows": rows}
    )


if __name__ == "__main__":
    main()
