"""Where to keep checkpoints of a recurrent state: rules beside each other on recorded sessions of agents.

A prefix cache of a hybrid model in one budget of bytes: KV blocks of the trace's size, and checkpoints, each the
recurrent state after a whole number of blocks. A hit ends at a checkpoint whose KV is there. Prompts only, one after
the other in the order of arrival; no model and no clock. The bound has the same KV and states that cost nothing.
With `--service`, the prompts are those of a service: short chats behind system messages that many chats share, or few.
"""

import argparse
import gzip
import json
import sys
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import count, pairwise, product
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from headstart.common_prefix import common_prefix_length
from headstart.workload.block_paths import overlap_sessions
from headstart.workload.recorded.trace_files import read_trace_path
from headstart.workload.traces import TracedRequest

KV_BYTES = 32 << 10  # per token: 8 layers of full attention, 4 KV heads of 256, keys and values in 2 bytes
STATE_BYTES = 48 << 20  # 24 layers, 32 heads, 128 x 128 in fp32, and the convolutions' inputs (below 1 MiB)
SPACING = 20_480  # tokens between checkpoints in long prompts: 7 % of the bytes; the engine: 29,184, 5 %
GRID = 1024
RULES = {
    "peers: ends + user messages": ("ends", "messages"),
    "+ system": ("ends", "messages", "system"),
    "+ junctions": ("ends", "messages", "system", "junctions"),
    "all: + spacing": ("ends", "messages", "system", "junctions", "spacing"),
    "ends + junctions": ("ends", "junctions"),
    "ends + junctions + spacing": ("ends", "junctions", "spacing"),
    "ends + junctions + spacing + system": ("ends", "junctions", "spacing", "system"),
    "grid of 1,024 + junctions": ("grid", "junctions"),
}
EVICTIONS = ("lru", "replaced first", "inner first", "inner, not branches", "in use")
# The last is the engine's: as "inner, not branches", and of a prompt all checkpoints in between count as used.
MAX_SHARE = 0.15  # of the budget, beyond which "inner ..." evicts checkpoints first that a prompt went on from


class Prompt(NamedTuple):
    """One request: its blocks, and the places in tokens that a front end knows, in rising order."""

    path: tuple[int, ...]
    length: int
    messages: tuple[int, ...]  # begin of each message of the user, tool results included
    system: tuple[int, ...]  # end of the tools and of the system message


class Cache:
    """KV blocks and checkpoints in one budget of bytes. An item is the last block of what it covers, and its kind."""

    def __init__(self, budget: int, block_size: int, places: Sequence[str], eviction: str, spacing: int) -> None:
        self.size, self.places, self.eviction, self.spacing = block_size, places, eviction, spacing // block_size
        self.budget, self.used, self.peak_state = budget, 0, 0.0
        self.items: OrderedDict[tuple[int, bool], int] = OrderedDict()  # (block, is a checkpoint) -> bytes; next first
        self.replaced: OrderedDict[tuple[int, bool], None] = OrderedDict()
        self.inner: OrderedDict[tuple[int, bool], None] = OrderedDict()  # from which one prompt went on to a later one
        self.branched: set[tuple[int, bool]] = set()  # from which several have
        self.reused: set[int] = set()  # blocks whose checkpoint was used and is kept like any other from then on
        self.fixed: set[int] = set()  # checkpoints at the end of a system message: never replaced
        self.state_bytes = 0
        self.shares: list[float] = []

    def serve(self, prompt: Prompt) -> tuple[int, int]:
        """Look a prompt up and keep it; return the tokens that were reused, and those whose KV was there."""
        path, size = prompt.path, self.size
        most = min(len(path), (prompt.length - 1) // size)
        depth = 0
        while depth < len(path) and (path[depth], False) in self.items:
            depth += 1
        hit = min(depth, most)
        if self.places:
            while hit and (path[hit - 1], True) not in self.items:
                hit -= 1
        new = self._places(prompt, hit, depth, most)
        if hit and self.places and self.eviction == "replaced first":
            self._replace(path[hit - 1], new)
        kept = set(new) | {hit}
        if self.eviction == "in use":
            kept.update(at for at in range(self.spacing, hit, self.spacing) if (path[at - 1], True) in self.items)
        for index in range(len(path), 0, -1):  # the tail is evicted before the head, a checkpoint after what follows it
            if index in kept and self.places and (index != hit or hit):
                self._touch((path[index - 1], True), STATE_BYTES)
            self._touch((path[index - 1], False), size * KV_BYTES)
        if self.eviction.startswith("in"):
            for at in (hit, *new)[:-1]:
                if self.eviction == "in use" and at % self.spacing == 0:
                    continue
                if at and not ("system" in self.places and at in [end // size for end in prompt.system]):
                    self._note_inner((path[at - 1], True))
        self._evict()
        self.shares.append(self.state_bytes / max(self.used, 1))
        return hit * size, min(depth, most) * size

    def _places(self, prompt: Prompt, hit: int, depth: int, most: int) -> list[int]:
        """Return the places, in blocks, of the checkpoints that this prompt leaves behind its hit."""
        size, found = self.size, set[int]()
        if "ends" in self.places:
            found.add(most)
        if "messages" in self.places:
            found.update(at // size for at in prompt.messages)
        if "system" in self.places:
            found.update(at // size for at in prompt.system)
            self.fixed.update(prompt.path[at // size - 1] for at in prompt.system if 0 < at // size <= len(prompt.path))
        if "junctions" in self.places and depth > hit:
            found.add(depth)
        if "grid" in self.places:
            found.update(range(0, most + 1, GRID // size))
        if "spacing" in self.places and self.eviction == "in use":
            found.update(range(self.spacing, most + 1, self.spacing))
        elif "spacing" in self.places:
            known = sorted({at for at in found if hit < at <= most} | {hit, most})
            for before, after in pairwise(known):
                found.update(range(before + self.spacing, after, self.spacing))
        return sorted(at for at in found if hit < at <= most)

    def _replace(self, block: int, new: Sequence[int]) -> None:
        """Let a checkpoint be evicted first that a prompt has used for the first time and left a deeper one."""
        item = (block, True)
        if block in self.fixed or item in self.replaced or block in self.reused:
            self.replaced.pop(item, None)
            self.reused.add(block)
        elif new:
            self.replaced[item] = None

    def _note_inner(self, item: tuple[int, bool]) -> None:
        if self.eviction in ("inner, not branches", "in use") and (item in self.inner or item in self.branched):
            self.inner.pop(item, None)
            self.branched.add(item)
        else:
            self.inner[item] = None
            self.inner.move_to_end(item)

    def _touch(self, item: tuple[int, bool], num_bytes: int) -> None:
        if item in self.items:
            self.items.move_to_end(item)
            return
        self.items[item] = num_bytes
        self.used += num_bytes
        self.state_bytes += num_bytes if item[1] else 0

    def _evict(self) -> None:
        while self.used > self.budget:
            first = self.inner if self.inner and self.state_bytes > MAX_SHARE * self.budget else self.replaced
            item = next(iter(first or self.items))
            self.replaced.pop(item, None)
            self.inner.pop(item, None)
            self.branched.discard(item)
            self.reused.discard(item[0])
            num_bytes = self.items.pop(item)
            self.used -= num_bytes
            self.state_bytes -= num_bytes if item[1] else 0
            if not item[1] and (item[0], True) in self.items:  # a checkpoint without its KV goes with it
                self.replaced[item[0], True] = None


def prompts_of(requests: Sequence[TracedRequest], size: int, system: dict[str, tuple[int, ...]]) -> Iterator[Prompt]:
    """Yield the prompts in order, with the begin of each message of the user, as far as the trace shows it."""
    last: dict[str, tuple[Prompt, int]] = {}
    for request in requests:
        path = tuple(request.hash_ids[: request.length // size])
        messages: tuple[int, ...] = ()
        if request.session in last:
            before, output = last[request.session]
            same = common_prefix_length(before.path, path)
            messages = tuple(at for at in before.messages if at <= same * size)
            if same == len(before.path):
                messages = (*messages, min(before.length + output, request.length))
        prompt = Prompt(path, request.length, messages, system.get(request.session, ()))
        last[request.session] = prompt, request.output
        yield prompt


def system_ends(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the ends of tools and system message by session."""
    found: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.json.gz")):
        with gzip.open(path) as file:
            session = json.load(file)
        tools = int(session["tool_tokens"])
        found[str(session["id"])] = (tools, tools + int(session["system_tokens"]))
    return found


def service(system: int, num_sharing: int, size: int) -> Iterator[Prompt]:
    """Yield the prompts of 600 chats, 24 at once, of 1 to 6 turns of 400 tokens behind `system` tokens.

    Of the chats, `num_sharing` after each other have the same system message.
    """
    rng, ids = Random(0), count()
    shared: dict[int, list[int]] = {}
    open_chats, begun = list[list[list[int]]](), 0
    while open_chats or begun < 600:
        if len(open_chats) < 24 and begun < 600:
            key = begun // num_sharing
            path = list(shared.setdefault(key, [next(ids) for _ in range(system // size)]))
            turns = list[list[int]]()
            for _ in range(rng.randint(1, 6)):
                path = path + [next(ids) for _ in range(400 // size)]
                turns.append(path)
            open_chats.append(turns)
            begun += 1
        chat = open_chats.pop(rng.randrange(len(open_chats)))
        path = chat.pop(0)
        yield Prompt(tuple(path), len(path) * size + size // 2, (), (system,))
        open_chats += [chat] if chat else []


def measure(
    prompts: Sequence[Prompt], size: int, budget: int, places: Sequence[str], eviction: str, spacing: int
) -> dict[str, Any]:
    """Serve all prompts once; return tokens reused and the share of checkpoints in the bytes used."""
    cache = Cache(budget, size, places, eviction, spacing)
    served = [cache.serve(prompt) for prompt in prompts]
    total = sum(prompt.length for prompt in prompts)
    return {
        "reused": round(sum(hit for hit, _ in served) / total, 4),
        "kv_there": round(sum(depth for _, depth in served) / total, 4),
        "state_share": round(sum(cache.shares) / len(cache.shares), 4),
    }


def served() -> list[dict[str, Any]]:
    """Return a row for each kind of service, pool and rule."""
    rows: list[dict[str, Any]] = []
    names = ["ends + junctions + spacing", "ends + junctions + spacing + system"]
    for system, num_sharing, pool in product((512, 2048, 8192), (1, 2, 600), (60_000, 1_000_000)):
        prompts = list(service(system, num_sharing, 64))
        for name in ("bound: states are free", *names):
            for eviction in ("inner first", "inner, not branches") if name in RULES else ("lru",):
                row = measure(prompts, 64, pool * KV_BYTES, RULES.get(name, ()), eviction, SPACING)
                setup = {"system": system, "num_sharing": num_sharing, "pool_tokens": pool}
                rows.append({**setup, "rule": name, "eviction": eviction, **row})
                print(*rows[-1].values(), sep="\t", file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path, nargs="?", help="a folder of sessions, such as AgentX's")
    parser.add_argument("--service", action="store_true", help="in place of a trace")
    parser.add_argument("--spacing", type=int, default=SPACING, help="tokens")
    parser.add_argument("--at-once", type=int, nargs="+", default=[8, 32], help="sessions that overlap")
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES))
    parser.add_argument("--evictions", nargs="+", choices=EVICTIONS, default=list(EVICTIONS))
    parser.add_argument("--pools", type=float, nargs="+", default=[0.5, 1, 2, 4, 1000], help="millions of tokens of KV")
    options = parser.parse_args()
    if options.service:
        print(json.dumps(served(), indent=1))
        return
    recorded, system = read_trace_path(options.trace), system_ends(options.trace)
    rows: list[dict[str, Any]] = []
    for at_once in options.at_once:
        trace = overlap_sessions(recorded, at_once)
        prompts = list(prompts_of(trace.requests, trace.block_size, system))
        for pool in options.pools:
            budget = int(pool * 1e6 * KV_BYTES)
            cases = [("bound: states are free", (), "lru")]
            cases += [(name, RULES[name], eviction) for name in options.rules for eviction in options.evictions]
            for name, places, eviction in cases:
                row = measure(prompts, trace.block_size, budget, places, eviction, options.spacing)
                rows.append({"at_once": at_once, "pool_mtokens": pool, "rule": name, "eviction": eviction, **row})
                print(*rows[-1].values(), sep="\t", file=sys.stderr, flush=True)
    setup = {
        "trace": options.trace.name,
        "requests": len(recorded.requests),
        "prompt_tokens": sum(request.length for request in recorded.requests),
        "block_size": recorded.block_size,
        "kv_bytes_per_token": KV_BYTES,
        "state_bytes": STATE_BYTES,
        "spacing": options.spacing,
    }
    print(json.dumps({"setup": setup, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
