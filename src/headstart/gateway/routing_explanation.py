"""explain: at which character two prompts of one tenant diverge, and why a replica reused no more, at the router.

Works with any engine: it needs only the router's recent requests (recent_routings.py) and the `cached_tokens` that
engines report. Tokens are approximate if the router has no tokenizer. Changes nothing. A caller sees prompts of one
tenant only: its own.
"""

import time
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any

from headstart.apis.api_table import generation_api_of_path
from headstart.core.errors import NoReplicaError
from headstart.gateway.proxy.proxied_call import ProxiedCall
from headstart.gateway.proxy.request_reader import ParsedRequest
from headstart.gateway.recent_routings import MAX_REQUESTS, NearestRequest, RecentRoutings, RoutedRequest
from headstart.http.auth import Principal
from headstart.http.http_errors import HttpError
from headstart.reuse.causes import KINDS, classify_difference, message_index_at, split_into_messages
from headstart.router.router import Router
from headstart.router.routing_decision import RoutingDecision

SHOWN_CHARS = 40  # on either side of a divergence
CHARS_PER_TOKEN = 4.0  # if tokens were not counted
SLACK_SHARE = 0.05  # of a prefix whose tokens are estimated, not counted

Json = dict[str, Any]


def explain(
    recent: RecentRoutings, request_id: str, *, tenant: str | None, now: float = 0.0, shows_replicas: bool = True
) -> Json:
    """Return why no more of a request of `tenant` was reused; `tenant` None: for an administrator.

    `shows_replicas` False omits the addresses of replicas.
    Raises HttpError 404 for an unknown id, or one of another tenant.
    """
    seen = recent.find(request_id, tenant)
    if seen is None:
        raise HttpError(
            404,
            f"request {request_id!a} is not among the recent ones; ask with the prompt instead, as a POST",
            code="unknown_request",
            param="request_id",
        )
    return _Case(recent, seen, now, shows_replicas).answer(request_id)


def explain_unsent_prompt(
    recent: RecentRoutings, asked: RoutedRequest, *, now: float = 0.0, shows_replicas: bool = True
) -> Json:
    """Return the same for a prompt that is not sent; `asked` holds the router's prediction and its replica."""
    return _Case(recent, replace(asked, cached_tokens=None), now, shows_replicas).answer(None)


@dataclass(frozen=True, slots=True)
class _Case:
    """One request to explain."""

    recent: RecentRoutings
    seen: RoutedRequest
    now: float
    shows_replicas: bool

    def answer(self, request_id: str | None) -> Json:
        seen, near = self.seen, self.recent.find_nearest(self.seen)
        reason, other = self._reason(near)
        answer: Json = {
            "object": "route.explanation",
            "request_id": request_id,
            "endpoint": seen.endpoint or None,
            "why_there": seen.why or None,
            "session": seen.session,
            "prompt_chars": len(seen.prompt) if isinstance(seen.prompt, str) else None,
            "prompt_tokens": _total(seen),
            "prompt_tokens_exact": _is_counted(seen),
            "predicted_tokens": seen.predicted_tokens,
            "cached_tokens": seen.cached_tokens,
            "block_size": seen.block_size,
            "reason": reason,
            "near_match": near and _near_match(seen, near),
            "other": other and _other(other, self.now),
        }
        if not self.shows_replicas:
            for part in (answer, answer["near_match"], answer["other"]):
                if part is not None:
                    part["endpoint"] = None
        return answer | {"message": routing_explanation_text(answer)}

    @property
    def _reused(self) -> int | None:
        """Tokens that were reused, or are predicted to be."""
        seen = self.seen
        return seen.predicted_tokens if seen.cached_tokens is None else seen.cached_tokens

    def _reason(self, near: NearestRequest | None) -> tuple[str, RoutedRequest | None]:
        """Return why no more was reused, and the request that shows it, if that is not the nearest one."""
        seen, reused = self.seen, self._reused
        if near is None:
            return ("unseen_but_cached" if reused else "never_seen"), None
        if reused is None:
            return "unreported", None
        if not self._had_more(near):
            return self._reason_of_nearest(near), None
        own = self.recent.find_nearest(seen, scope=seen.cache_scope)
        if own is None or not self._had_more(own):
            return "isolated", near.seen
        here = self.recent.find_nearest(seen, scope=seen.cache_scope, endpoint=seen.endpoint) if seen.endpoint else own
        if here is None or not self._had_more(here):
            return "other_replica", own.seen
        done = here.seen.reported_at
        if seen.cached_tokens is not None and (done is None or done > seen.at):
            return "computing", here.seen
        return "evicted", here.seen

    def _reason_of_nearest(self, near: NearestRequest) -> str:
        """Return why no more was reused if no recent request had a longer reusable prefix."""
        if near.common == len(self.seen.prompt):
            return "complete"
        if not self._reused and not self._reusable(near.common):
            return "too_short" if _total(self.seen) < self.seen.block_size else "never_seen"
        return "extends" if near.common >= len(near.seen.prompt) else "diverged"

    def _reusable(self, common: int) -> int:
        """Return the tokens in whole blocks of so many leading characters; the last token is always computed."""
        tokens = _tokens_of(self.seen, common)
        return max(min(tokens // self.seen.block_size * self.seen.block_size, _total(self.seen) - 1), 0)

    def _had_more(self, near: NearestRequest) -> bool:
        """Return whether that request had more reusable tokens than were reused, as far as can be determined."""
        tokens = self._reusable(near.common)
        slack = self.seen.block_size + int(SLACK_SHARE * tokens) if isinstance(self.seen.prompt, str) else 0
        return tokens - slack > (self._reused or 0)


def _is_counted(seen: RoutedRequest) -> bool:
    return bool(seen.prompt_tokens) or not isinstance(seen.prompt, str)


def _total(seen: RoutedRequest) -> int:
    """Return the tokens of a prompt, counted or estimated."""
    if not isinstance(seen.prompt, str):
        return len(seen.prompt)
    return seen.prompt_tokens or -(-len(seen.prompt) // int(CHARS_PER_TOKEN))


def _tokens_of(seen: RoutedRequest, common: int) -> int:
    """Return the estimated tokens of the leading characters; no more than bytes: templates add tokens elsewhere."""
    prompt = seen.prompt
    if not isinstance(prompt, str):
        return common
    tokens = int(common * _total(seen) / max(len(prompt), 1) + 1e-6)
    return tokens if tokens <= common else min(tokens, len(prompt[:common].encode("utf-8", "surrogatepass")))


def _near_match(seen: RoutedRequest, near: NearestRequest) -> Json:
    this, that, at = seen.prompt, near.seen.prompt, near.common
    found: Json = {
        "request_id": near.seen.request_id,
        "endpoint": near.seen.endpoint or None,
        "common_chars": at if isinstance(this, str) else None,
        "common_tokens": _tokens_of(seen, at),
        "text_before": _shown(this, max(at - SHOWN_CHARS, 0), at),
        "text": _shown(this, at, at + SHOWN_CHARS),
        "other_text": _shown(that, at, at + SHOWN_CHARS),
        "kind": None,
        "message": None,
    }
    if isinstance(this, str) and isinstance(that, str):
        is_chat = seen.is_chat and near.seen.is_chat
        found["kind"] = classify_difference(this, that, at, is_chat=is_chat)
        found["message"] = _message(this, at) if seen.is_chat else None
    return found


def _shown(prompt: Any, start: int, end: int) -> str:
    """Return a readable piece of a prompt; of token ids as many, separated by spaces."""
    piece = prompt[start:end]
    return piece if isinstance(piece, str) else " ".join(map(str, piece))


def _message(text: str, at: int) -> Json | None:
    messages = split_into_messages(text)
    index = message_index_at(messages, at)
    if index is None:
        return None
    return {"index": index, "role": messages[index].role, "offset": max(at - messages[index].start, 0)}


def _other(other: RoutedRequest, now: float) -> Json:
    return {
        "request_id": other.request_id,
        "endpoint": other.endpoint or None,
        "why_there": other.why or None,
        "session": other.session,
        "seconds_ago": max(now - other.at, 0.0),
    }


# --------------------------------------------------------------------------------------------------------- in words


def routing_explanation_text(answer: Json) -> str:
    """Return an answer as text: a paragraph, and the two texts below it where prompts diverge."""
    near = answer["near_match"]
    parts = [_account(answer)]
    if near is not None:
        parts.append(_shares(answer, near))
    parts.append(_REASONS[answer["reason"]].format_map(_words(answer)))
    return " ".join(filter(None, parts)) + _texts(near)


def _account(answer: Json) -> str:
    about = "" if answer["prompt_tokens_exact"] else "about "
    total = f"{about}{answer['prompt_tokens']:,} prompt tokens"
    where = f" at {answer['endpoint']}" if answer["endpoint"] else ""
    if answer["cached_tokens"] is not None:
        return f"{answer['cached_tokens']:,} of {total} were cached{where}."
    if answer["predicted_tokens"] is not None:
        verb = "would be" if answer["request_id"] is None else "should have been"
        return f"{answer['predicted_tokens']:,} of {total} {verb} cached{where}, by what the router knows."
    return f"It has {total}; how many were cached is not known."


def _shares(answer: Json, near: Json) -> str:
    size, unit = near["common_chars"], "characters"
    if size is None:
        size, unit = near["common_tokens"], "token ids"
    about = f" (about {near['common_tokens']:,} tokens)" if unit == "characters" else ""
    head = f"It shares its first {size:,} {unit}{about} with request {near['request_id']}"
    if not near["text"]:
        return f"{head}, and ends there."
    if not near["other_text"]:
        return f"{head}, which ends there: what follows is new."
    where = near["message"]
    place = f" in message {where['index'] + 1} ({where['role']})" if where else ""
    kind = f"; what differs{place} is {KINDS[near['kind']]}" if near["kind"] else ", where they differ"
    return f"{head}{kind}."


def _words(answer: Json) -> Json:
    other = answer["other"] or {}
    why = f" ({answer['why_there']})" if answer["why_there"] else ""
    return {
        "size": answer["block_size"],
        "here": answer["endpoint"] or "the replica",
        "there": other.get("endpoint") or "another replica",
        "who": other.get("request_id"),
        "why": why,
        "ago": f"{other.get('seconds_ago', 0.0):,.0f} s ago",
    }


_REASONS = {
    "complete": "Everything was there; the last token is always computed, because the answer begins from it.",
    "diverged": "That much was reused, as far as whole blocks go.",
    "extends": "That much was reused, as far as whole blocks go.",
    "too_short": "That does not fill a block of {size} tokens, and blocks are shared whole.",
    "isolated": (
        "More than was reused is the same as in request {who}, which has another isolation domain, model or adapter: "
        "equal prompts share nothing across these."
    ),
    "other_replica": "But request {who} went to {there}, and this one to {here}{why}, "
    "which had not seen as much of it.",
    "computing": "Request {who} had the same beginning there, and had not been answered yet when this one was sent.",
    "evicted": "Request {who} had the same beginning at the same place {ago}: it is not there any more, evicted since "
    "or lost in a restart.",
    "unreported": "What was reused is not known yet, or the engine does not report it.",
    "unseen_but_cached": "No recent request of yours through this router begins like this one: what was cached came by "
    "another way.",
    "never_seen": "No recent request of yours through this router begins with the same block of {size} tokens, and "
    "blocks are shared whole.",
}


def _texts(near: Json | None) -> str:
    if near is None or not near["text"] or not near["other_text"]:
        return ""
    return f"\n  both:  {near['text_before']!r}\n  that:  {near['other_text']!r}\n  this:  {near['text']!r}"


class RequestHistory:
    """The latest requests of all tenants, by the router's ids (x-request-id) and by those in answers."""

    def __init__(self, router: Router, max_bytes: int) -> None:
        """`max_bytes` of prompts and their hashes are kept; 0: none."""
        self._router = router
        self._recent = RecentRoutings(max_bytes=max_bytes)
        self._ids: OrderedDict[str, str] = OrderedDict()  # id in an answer -> the router's id

    def record_ended(self, call: ProxiedCall, principal: Principal) -> None:
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

    def explain_reuse(self, request_id: str, principal: Principal) -> Json:
        """Return why no more of a request was reused.

        Raises HttpError 404 for an unknown request, or one of another tenant.
        """
        tenant = None if principal.is_admin else principal.tenant
        known = self._ids.get(request_id, request_id)
        answer = explain(self._recent, known, tenant=tenant, now=time.monotonic(), shows_replicas=principal.is_admin)
        return answer | {"request_id": request_id}

    def explain_unsent_prompt(self, path: str, reading: ParsedRequest, principal: Principal) -> Json:
        """Return the same explanation for a prompt that is not sent."""
        now = time.monotonic()
        try:
            decision = self._router.pick(reading.request, now)
        except NoReplicaError:
            decision = None
        asked = _seen("", path, reading, principal, decision)
        return explain_unsent_prompt(self._recent, asked, now=now, shows_replicas=principal.is_admin)


def _seen(
    request_id: str, path: str, reading: ParsedRequest, principal: Principal, decision: RoutingDecision | None
) -> RoutedRequest:
    prompt = reading.text if reading.text is not None else reading.request.prompt.token_ids
    exact = reading.request.prompt.exact
    seen = RoutedRequest(
        request_id,
        principal.tenant,
        prompt,
        is_chat=generation_api_of_path(path).chat_values is not None,
        domain=reading.domain,
        model=reading.request.model,
        adapter=reading.request.adapter,
        session=reading.session,
        prompt_tokens=reading.request.prompt.num_tokens if exact else 0,
    )
    if decision is not None:
        seen.endpoint, seen.why = decision.endpoint.name, decision.choice.reason
        seen.block_size = decision.endpoint.block_size
        seen.predicted_tokens = decision.candidate.hit_tokens
    return seen
