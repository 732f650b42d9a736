"""Calls that the HTTP process may make on a running engine, by name: a closed table, executed between two steps.

Arguments and results are plain values (None, bool, int, float, str, bytes, list, dict), since they cross the process
boundary as msgpack. A call that raises InvalidRequestError is refused; any other exception is a bug and fails only
that call.
"""

import time
from array import array
from collections.abc import Callable
from typing import Any

from headstart.core.cache.pinned_prefix import PrefixInfo
from headstart.core.engine import Engine
from headstart.core.request import CacheMode, Request, SamplingParams
from headstart.engine.wire import stats_to_builtins
from headstart.reuse.reuse_explainer import Viewer, explain_prompt_reuse, explain_request_reuse

Plain = dict[str, Any]
KEY_BYTES = 16  # of a block hash, as far as it is sent: enough to tell the blocks of one pool apart
MAX_SCANNED_BLOCKS = 2048  # between two steps: a few milliseconds


def reset_prefix_cache(engine: Engine, argument: Plain | None) -> bool:
    """Reset the prefix cache; return False if requests are running.

    {"pinned": true} also drops pinned prefixes; {"external": true} also clears the store, for all its users.
    """
    options = argument or {}
    return engine.reset_prefix_cache(pinned=options.get("pinned", False), external=options.get("external", False))


def add_prefix(engine: Engine, argument: Plain) -> Plain:
    """Pin a prefix, {name, tenant, domain, token_ids: packed int32}, start to compute it, and return its entry."""
    token_ids = array("i", argument["token_ids"])
    return _plain(engine.add_prefix(argument["name"], token_ids, tenant=argument["tenant"], domain=argument["domain"]))


def remove_prefix(engine: Engine, name: str) -> bool:
    """Unpin a prefix; return False if there is none of that name."""
    return engine.remove_prefix(name)


def list_prefixes(engine: Engine, argument: None) -> list[Plain]:
    """Return the entries of all prefixes."""
    return [_plain(info) for info in engine.list_prefixes()]


def cache_stats(engine: Engine, argument: None) -> list[Any]:
    """Return EngineStats as plain values."""
    return stats_to_builtins(engine.stats())


def explain(engine: Engine, argument: dict[str, Any]) -> dict[str, Any] | None:
    """Return an Explanation as a dict: of `request_id` (None if unknown or of another tenant), or of a `prompt`."""
    viewer = Viewer(argument["tenant"], argument["is_admin"])
    if "request_id" in argument:
        request_id = argument["request_id"]
        found = explain_request_reuse(engine.scheduler, engine.recent, request_id, viewer, argument["now"])
    else:
        request = _request(argument["prompt"], viewer.tenant)
        found = explain_prompt_reuse(engine.scheduler, engine.recent, request, viewer, argument["now"])
    return None if found is None else found.as_dict()


def cache_blocks(engine: Engine, argument: Plain) -> Plain:
    """Return the published blocks with ids from `start` on, at most MAX_SCANNED_BLOCKS ids, as columns of equal length.

    `num_blocks` is the size of the pool, `seconds` the time that the call took.
    """
    begun, pool, start = time.perf_counter(), engine.scheduler.pool, argument["start"]
    rows = pool.published_in_id_range(start, start + MAX_SCANNED_BLOCKS)
    return {
        "num_blocks": pool.num_blocks,
        "blocks": [row.block for row in rows],
        "hashes": [row.block_hash[:KEY_BYTES] for row in rows],
        "parents": [row.parent[:KEY_BYTES] for row in rows],
        "users": [row.num_refs for row in rows],
        "pinned": [row.is_pinned for row in rows],
        "reused": [row.is_reused for row in rows],
        "tenants": [row.tenant for row in rows],
        "seconds": time.perf_counter() - begun,
    }


def block_tokens(engine: Engine, argument: Plain) -> list[bytes]:
    """Return the packed token ids of each of `blocks`; empty for one that has no longer the hash in `hashes`."""
    found: list[bytes] = []
    for block, key in zip(argument["blocks"], argument["hashes"], strict=True):
        rows = engine.scheduler.pool.published_in_id_range(block, block + 1)
        entry = (
            engine.scheduler.pool.published_entry(rows[0].block_hash)
            if rows and rows[0].block_hash[:KEY_BYTES] == key
            else None
        )
        found.append(b"" if entry is None else entry[2])
    return found


def _request(prompt: dict[str, Any], tenant: str) -> Request:
    return Request(
        request_id="",
        prompt=array("i", prompt["tokens"]),
        sampling=SamplingParams(prompt_logprobs=prompt["prompt_logprobs"]),
        domain=prompt["domain"],
        adapter=prompt["adapter"],
        cache=CacheMode(prompt["cache"]),
        tenant=tenant,
    )


CALLS: dict[str, Callable[[Engine, Any], Any]] = {
    call.__name__: call
    for call in (
        *(reset_prefix_cache, cache_stats, explain, cache_blocks, block_tokens),
        *(add_prefix, remove_prefix, list_prefixes),
    )
}


def _plain(info: PrefixInfo) -> Plain:
    """Return the entry of a prefix as in GET /v1/prefixes; `last_used` in seconds since 1970."""
    used = info.last_used
    return {
        "name": info.name,
        "tenant": info.tenant,
        "state": info.state.value,
        "error": info.error,
        "tokens": info.num_tokens,
        "blocks": info.num_blocks,
        "hits": info.hits,
        "tokens_saved": info.tokens_saved,
        "last_used": None if used is None else round(time.time() - (time.monotonic() - used), 3),
    }
