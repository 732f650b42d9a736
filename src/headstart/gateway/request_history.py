"""RequestHistory: the latest requests of a router, under the ids that clients know, for `/v1/cache/explain`."""

import time
from collections import OrderedDict

from headstart.apis.api_table import generation_api
from headstart.core.errors import NoReplicaError
from headstart.gateway.proxy.proxied_call import ProxiedCall
from headstart.gateway.proxy.request_reader import ReadRequest
from headstart.gateway.recent_routings import MAX_REQUESTS, RecentRoutings, Seen
from headstart.gateway.routing_explanation import Json, explain, explain_prompt
from headstart.http.auth import Principal
from headstart.router.router import Router
from headstart.router.routing_decision import RoutingDecision


class RequestHistory:
    """The latest requests of all tenants, by the router's ids (x-request-id) and by those in answers."""

    def __init__(self, router: Router, max_bytes: int) -> None:
        """`max_bytes` of prompts and their hashes are kept; 0: none."""
        self._router = router
        self._recent = RecentRoutings(max_bytes=max_bytes)
        self._ids: OrderedDict[str, str] = OrderedDict()  # id in an answer -> the router's id

    def sent(self, call: ProxiedCall, principal: Principal) -> None:
        """Add a request that has ended and was sent to a replica at least once."""
        decision = call.in_flight
        if decision is None or call.is_trimmed:
            return
        seen = _seen(call.request_id, call.path, call.reading, principal, decision)
        seen.at = decision.sent_at or 0.0
        if decision.cached_tokens is not None:
            seen.cached_tokens, seen.reported_at = decision.cached_tokens, decision.finish
        self._recent.add(seen)
        if call.answer_id:
            self._ids[call.answer_id] = call.request_id
            while len(self._ids) > MAX_REQUESTS:
                self._ids.popitem(last=False)

    def explain(self, request_id: str, principal: Principal) -> Json:
        """Return why no more of a request was reused.

        Raises HttpError 404 for an unknown request, or one of another tenant.
        """
        tenant = None if principal.is_admin else principal.tenant
        known = self._ids.get(request_id, request_id)
        answer = explain(self._recent, known, tenant=tenant, now=time.monotonic(), shows_replicas=principal.is_admin)
        return answer | {"request_id": request_id}

    def explain_prompt(self, path: str, reading: ReadRequest, principal: Principal) -> Json:
        """Return the same explanation for a prompt that is not sent."""
        now = time.monotonic()
        try:
            decision = self._router.pick(reading.request, now)
        except NoReplicaError:
            decision = None
        asked = _seen("", path, reading, principal, decision)
        return explain_prompt(self._recent, asked, now=now, shows_replicas=principal.is_admin)


def _seen(
    request_id: str, path: str, reading: ReadRequest, principal: Principal, decision: RoutingDecision | None
) -> Seen:
    prompt = reading.text if reading.text is not None else reading.request.prompt.token_ids
    exact = reading.request.prompt.exact
    seen = Seen(
        request_id,
        principal.tenant,
        prompt,
        is_chat=generation_api(path).chat_values is not None,
        domain=reading.domain,
        model=reading.request.model,
        adapter=reading.request.adapter,
        prompt_tokens=reading.request.prompt.num_tokens if exact else 0,
    )
    if decision is not None:
        seen.endpoint, seen.why = decision.endpoint.name, decision.choice.reason
        seen.block_size = decision.endpoint.block_size
        seen.predicted_tokens = decision.candidate.hit_tokens
    return seen
