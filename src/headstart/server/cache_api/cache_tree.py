"""CacheTreeSnapshot: the route /v1/cache/tree. One snapshot of the pool's index serves all callers for at least half
a second.

The engine is asked for the index in slices, each between two steps, so blocks may come and go between two slices. A
caller sees the blocks of its own tenant only, an administrator those of all.
"""

import asyncio
import time
from array import array
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from msgspec import Raw

from headstart.core.engine_info import EngineStats
from headstart.engine.engine_calls import MAX_SCANNED_BLOCKS
from headstart.engine.engine_client import EngineClient
from headstart.http.auth import Principal
from headstart.openai.json_pieces import encode_json
from headstart.openai.responses import Json
from headstart.page.prefix_tree import COLUMNS, BlockRun, PrefixTree, TreeBlock
from headstart.server.server_state import ServedModel

MAX_RUNS = 10_000
DEFAULT_RUNS = 2_000
MAX_TEXTS = 200  # runs with the beginning of their text
MAX_TEXT_CHARS = 80
MAX_TENANTS = 20
MIN_SECONDS = 0.5  # between two snapshots: less than between two frames, each of which makes a page ask
ENGINE_SHARE = 0.005  # of the engine's time that snapshots may take
SERVER_SHARE = 0.01  # of a core's that trees and rows may take

T = TypeVar("T")


class CacheTreeSnapshot:
    """The latest snapshot of the engine's index, and the trees of callers that have asked for it."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._lock = asyncio.Lock()
        self._blocks: list[TreeBlock] = []
        self._trees: dict[str | None, tuple[PrefixTree, Counter[str]]] = {}  # by tenant; None: of administrators
        self._rows: dict[str | None, tuple[int, Raw]] = {}  # of the last answer of each: its most runs, their JSON
        self._at = 0.0
        self._spent = 0.0  # CPU seconds of trees and rows of the snapshot
        self._stale_at = 0.0
        self._stats: EngineStats | None = None  # before the snapshot

    async def tree_json(self, model: ServedModel, principal: Principal, max_runs: int) -> Json:
        """Return the JSON of /v1/cache/tree as the caller may see it, with at most `max_runs` runs."""
        tenant = None if principal.is_admin else principal.tenant
        async with self._lock:
            if self._engine.stats == self._stats:
                self._at = time.monotonic()  # the snapshot still holds
            elif time.monotonic() >= self._stale_at:
                await self._refresh()
            if tenant not in self._trees:
                self._trees[tenant] = await self._tree(tenant)
            (tree, blocks), at = self._trees[tenant], self._at
            most, rows = self._rows.get(tenant, (0, Raw()))
            if most != max_runs:
                rows = await self._make_rows(model, tree, max_runs)
                self._rows[tenant] = max_runs, rows
        size = model.info.block_size
        held = {name: count * size for name, count in blocks.most_common(MAX_TENANTS)}
        return {
            "object": "cache.tree",
            "model": model.name,
            "block_size": size,
            "capacity_tokens": model.info.num_blocks * size,
            "tokens": tree.num_blocks * size,
            "num_runs": len(tree.runs),
            "seconds_ago": round(time.monotonic() - at, 3),
            "tenants": held,
            "columns": list(COLUMNS),
            "runs": rows,
        }

    async def _refresh(self) -> None:
        stats, blocks, start, end, seconds = self._engine.stats, list[TreeBlock](), 0, 1, 0.0
        while start < end:
            found = await self._engine.call("cache_blocks", {"start": start})
            end, seconds = found["num_blocks"], seconds + found["seconds"]
            columns = ("blocks", "hashes", "parents", "users", "pinned", "reused", "tenants")
            blocks += map(TreeBlock, *(found[name] for name in columns))
            start += MAX_SCANNED_BLOCKS
        self._blocks, self._trees, self._rows, self._stats, self._spent = blocks, {}, {}, stats, 0.0
        self._at = time.monotonic()
        self._stale_at = self._at + max(MIN_SECONDS, seconds / ENGINE_SHARE)

    async def _tree(self, tenant: str | None) -> tuple[PrefixTree, Counter[str]]:
        """Return the tree that a caller may see, and the blocks in it by tenant."""
        blocks = self._blocks
        own = blocks if tenant is None else [block for block in blocks if block.tenant == tenant]
        tree, seconds = await asyncio.to_thread(_timed, lambda: PrefixTree(own))
        self._spend(seconds)
        return tree, Counter(block.tenant for block in own)

    async def _make_rows(self, model: ServedModel, tree: PrefixTree, max_runs: int) -> Raw:
        """Return the JSON of the largest runs, the largest subtrees of them with the beginning of their text.

        Other callers with the same tree and `max_runs` get the same.
        """
        runs, seconds = _timed(lambda: tree.largest_runs(max_runs))
        by_size = sorted(range(len(runs)), key=lambda index: -runs[index].num_subtree_blocks)[:MAX_TEXTS]
        chosen = [runs[index].first for index in by_size]
        argument = {"blocks": [block.block for block in chosen], "hashes": [block.key for block in chosen]}
        tokens = await self._engine.call("block_tokens", argument)

        def rows() -> Raw:
            decode = model.tokenizer.decode
            texts = (decode(array("i", packed), skip_special_tokens=False)[:MAX_TEXT_CHARS] for packed in tokens)
            of_run = dict(zip(by_size, texts, strict=True))
            size = model.info.block_size
            return Raw(encode_json([_row(run, size, of_run.get(index, "")) for index, run in enumerate(runs)]))

        found, more = _timed(rows)
        self._spend(seconds + more)
        return found

    def _spend(self, seconds: float) -> None:
        self._spent += seconds
        self._stale_at = max(self._stale_at, self._at + self._spent / SERVER_SHARE)


def _timed(make: Callable[[], T]) -> tuple[T, float]:
    """Return what a call returns, and its CPU seconds."""
    begun = time.thread_time()
    return make(), time.thread_time() - begun


def _row(run: BlockRun, block_size: int, text: str) -> list[object]:
    """Return the values of COLUMNS."""
    first = run.first
    tokens, below = run.num_blocks * block_size, run.num_subtree_blocks * block_size
    return [
        first.key[:8].hex(),
        run.parent,
        tokens,
        below,
        first.num_users,
        first.usage_state,
        first.is_pinned,
        first.tenant,
        text,
    ]
