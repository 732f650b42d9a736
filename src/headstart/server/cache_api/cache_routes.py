"""The routes about the cache: counters, why a prompt had no more prefix cache hits, and a tenant's own requests."""

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request

from headstart.core.batch import PromptTokenBreakdown
from headstart.core.engine_info import EngineStats
from headstart.core.errors import InvalidRequestError
from headstart.core.request import Request as EngineRequest
from headstart.engine.wire import stats_from_values
from headstart.http.access_record import access_record_of_scope
from headstart.http.auth import Principal
from headstart.http.http_errors import HttpError
from headstart.openai.engine_requests import RequestOrigin
from headstart.openai.request_json import parse_json_object
from headstart.openai.responses import CACHE_SOURCES, Json
from headstart.openai.value_checks import parse_positive_query_count
from headstart.server.apis.choice_apis import CHAT, COMPLETIONS
from headstart.server.cache_api.explanation_text import reuse_explanation_json
from headstart.server.inference import run_with_body
from headstart.server.prompt_doctor import AvoidableCounts
from headstart.server.prompt_log import MAX_LISTED
from headstart.server.server_metrics import blocks_by_state, prefill_redundancy
from headstart.server.server_state import ServerState
from headstart.server.store_metrics import may_see_store, store_stats_json

_MAX_ID_CHARS = 128


async def fetch_cache_stats_json(state: ServerState, principal: Principal) -> Json:
    """Return the JSON of /v1/cache/stats: counters since start and current gauges. Raises HttpError, EngineDeadError.

    Counters only grow, so the difference of two responses covers the time between them. Counts by tenant are for
    administrators; a tenant sees its own. Counts of the store are shown as `may_see_store` allows.
    """
    model = state.check_ready()
    stats = stats_from_values(await state.engine.call("cache_stats"))
    rows = model.metrics.tenants.items()
    shown = {name: breakdown for name, breakdown in rows if principal.is_admin or name == principal.tenant}
    answer = engine_cache_stats_json(stats, model.name, model.info.block_size, shown)
    answer["losses"] = cache_losses_json(stats.counters.evicted_tokens, model.doctor.counts)
    for name, row in answer["tenants"].items():
        counts = model.doctor.tenants.get(name, AvoidableCounts())
        row |= {"examined": counts.prompt_tokens, "avoidable": counts.avoidable_tokens}
    return answer | {"store": store_stats_json(stats)} if may_see_store(principal) else answer


def engine_cache_stats_json(
    stats: EngineStats, model_name: str, block_size: int, tenants: Mapping[str, PromptTokenBreakdown]
) -> Json:
    """Return the JSON of /v1/cache/stats without the store. Values are tokens unless the key names another unit."""
    counters, pool = stats.counters, stats.pool
    sources = {source: getattr(counters, f"{source}_tokens") for source in CACHE_SOURCES}
    return {
        "object": "cache.stats",
        "model": model_name,
        "block_size": block_size,
        "prompt_tokens": {
            "total": counters.prompt_tokens,
            "cached": counters.cached_tokens,
            **sources,
            "computed": counters.prompt_computed_tokens,
        },
        "hit_rate": counters.cached_tokens / counters.prompt_tokens if counters.prompt_tokens else None,
        "prefill_tokens": counters.prefill_tokens,
        "ideal_tokens": counters.ideal_tokens,
        "replayed_tokens": counters.replayed_tokens,
        "prefill_redundancy": prefill_redundancy(stats),
        "generation_tokens": counters.generation_tokens,
        "computed_tokens": counters.computed_tokens,
        "blocks": {
            "total": pool.num_blocks,
            **blocks_by_state(stats),
            "published": pool.num_published,
            "pinned": pool.num_pinned,
        },
        "evictions": pool.evictions_by_cause,
        "requests": {
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "failed": counters.num_row_errors,
        },
        "preemptions": counters.num_preemptions,
        "promise_skips": counters.num_promise_skips,
        "adoptions": counters.num_adoptions,
        "steps": stats.num_steps,
        "step_seconds": stats.step_seconds,
        "tenants": {
            tenant: {"cached": breakdown.num_cached, **breakdown._asdict()} for tenant, breakdown in tenants.items()
        },
    }


def cache_losses_json(num_evicted: int, counts: AvoidableCounts) -> Json:
    """Return what was computed although it need not have been: exact for evictions, from a sample for prompts."""
    return {
        "evicted_tokens": num_evicted,
        "examined_requests": counts.num_requests,
        "examined_tokens": counts.prompt_tokens,
        "avoidable_tokens": counts.avoidable_tokens,
        "avoidable_share": counts.share,
        "causes": dict(counts.causes),
    }


async def reuse_explanation_response(state: ServerState, request: Request) -> Json:
    """Return why a request (`?request_id=`) or a prompt (the body) has no more prefix cache hits.

    Raises HttpError 404 for an id that is unknown or another tenant's, InvalidRequestError for an invalid body.
    """
    model = state.check_ready()
    principal = access_record_of_scope(request.scope).principal
    log, tenant, findings = state.prompt_log, principal.tenant, list[Json]()
    argument: dict[str, Any] = {"tenant": principal.tenant, "is_admin": principal.is_admin, "now": time.monotonic()}
    if request.method == "GET":
        request_id = _request_id(request)
        found = await state.engine.call("explain", {**argument, "request_id": request_id})
        if found is None:  # several prompts or choices: explain the first one
            found = await state.engine.call("explain", {**argument, "request_id": f"{request_id}-0"})
        if found is None:
            raise HttpError(
                404,
                f"request {request_id!a} is not among the recent ones; ask with the prompt instead, as a POST",
                code="unknown_request",
                param="request_id",
            )
        if log.is_on:
            findings = await asyncio.to_thread(log.request_diagnosis, tenant, answer_id=request_id)
    else:
        prompt, values = await _parsed(state, request)
        if log.is_on:
            findings = await asyncio.to_thread(log.request_diagnosis, tenant, body=values)
        found = await state.engine.call("explain", {**argument, "prompt": _plain(prompt)})
    return reuse_explanation_json(found, model.tokenizer, findings)


async def recent_bodies_response(state: ServerState, request: Request) -> Json:
    """Return the last request bodies of the caller's own tenant. Raises HttpError 404 if the server keeps none."""
    state.check_ready()
    if not state.prompt_log.is_on:
        raise HttpError(
            404,
            "this server keeps no prompts; start it with --prompt-log-size, in bytes",
            code="not_kept",
        )
    last = parse_positive_query_count("last", request.query_params.get("last", str(MAX_LISTED)), MAX_LISTED)
    tenant = access_record_of_scope(request.scope).principal.tenant
    return {"object": "list", "data": await asyncio.to_thread(state.prompt_log.last_bodies_of_tenant, tenant, last)}


def _request_id(request: Request) -> str:
    request_id = request.query_params.get("request_id", "")
    if not 0 < len(request_id) <= _MAX_ID_CHARS:
        raise InvalidRequestError(
            f"request_id has {len(request_id)} characters; give the id of an answer, at most {_MAX_ID_CHARS}: "
            f"?request_id=chatcmpl-...",
            param="request_id",
        )
    return request_id


async def _parsed(state: ServerState, request: Request) -> tuple[EngineRequest, Json]:
    """Return the engine request that this body would produce as a completion or a chat, and the body.

    Raises InvalidRequestError.
    """
    model, principal = state.loaded_model, access_record_of_scope(request.scope).principal
    origin = RequestOrigin("explain", domain=principal.domain, tenant=principal.tenant)

    def prepare(data: bytes) -> tuple[list[EngineRequest], Json]:
        values = parse_json_object(data, model.bounds.max_numbers)
        api = CHAT if "messages" in values else COMPLETIONS
        asked = api.prepare(values, model, origin)
        return asked.requests[:: asked.params.n], values

    requests, values = await run_with_body(state, request, prepare, renders=True)
    if len(requests) > 1:
        raise InvalidRequestError(f"there are {len(requests)} prompts; ask about one at a time", param="prompt")
    return requests[0], values


def _plain(request: EngineRequest) -> Json:
    """Return the fields of a request that determine prefix cache hits, as plain values."""
    return {
        "tokens": request.prompt.tobytes(),
        "domain": request.domain,
        "adapter": request.adapter,
        "cache": request.cache.value,
        "prompt_logprobs": request.sampling.prompt_logprobs,
    }
