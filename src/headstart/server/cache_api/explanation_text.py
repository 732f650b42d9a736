"""The response of /v1/cache/explain: the engine's Explanation with the texts of its tokens and a readable message."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headstart.core.cache.pinned_prefixes import REQUEST_PREFIX
from headstart.openai.responses import CACHE_SOURCES, Json, token_text_or_bytes
from headstart.openai.tokenizer.tokenizer import Tokenizer
from headstart.reuse.causes import KINDS, classify_difference

SHOWN_CHARS = 40  # on either side of a divergence
_NAMED_KINDS = frozenset(
    {"timestamp", "uuid", "identifier", "number", "token_count", "whitespace", "json_order", "order"}
)
_CAUSES = {
    "capacity": "evicted to make room",
    "failed": "dropped because a request that used them failed in the engine",
    "reset": "dropped when the prefix cache was reset",
}


def reuse_explanation_json(found: Mapping[str, Any], tokenizer: Tokenizer, findings: Sequence[Json] = ()) -> Json:
    """Return the JSON of /v1/cache/explain from the result of the engine's "explain" call.

    `findings`: of the prompt log, empty without one.
    """
    near, eviction = found["near"], found["eviction"]
    answer: Json = {
        "object": "cache.explanation",
        "request_id": found["request_id"],
        "status": found["status"],
        "prompt_tokens": found["num_prompt_tokens"],
        "block_size": found["block_size"],
        "reused_tokens": found["position"],
        "sources": found["then"] and _sources(found["then"]),
        "now": _sources(found["now"]),
        "reason": found["reason"],
        "near_match": near and _near_match(near, tokenizer),
        "eviction": eviction,
        "findings": list(findings),
    }
    return answer | {"message": reuse_explanation_text(answer)}


def reuse_explanation_text(answer: Json) -> str:
    """Return a response as plain text: a paragraph, and below it the two texts where the prompts diverge."""
    findings = "".join(f"\n  {finding['message']}" for finding in answer["findings"])
    return f"{_cached_sentence(answer)} {_reason_sentence(answer)}{_texts(answer['near_match'])}{findings}"


def _sources(breakdown: Mapping[str, int]) -> Json:
    cached = sum(breakdown[source] for source in CACHE_SOURCES)
    return {
        "cached_tokens": cached,
        **{f"{source}_tokens": breakdown[source] for source in (*CACHE_SOURCES, "computed")},
    }


def _near_match(near: Mapping[str, Any], tokenizer: Tokenizer) -> Json:
    def text(token_ids: Sequence[int]) -> str:
        return tokenizer.decode(token_ids, skip_special_tokens=False).strip("\ufffd")

    this, other = near["this"], near["other"]
    before = text(near["before"])
    kind = classify_difference(before + text(this), before + text(other), len(before)) if this and other else None
    return {
        "request_id": near["request_id"],
        "common_tokens": near["common_tokens"],
        "text_before": before[-SHOWN_CHARS:],
        "token": _token(this, tokenizer),
        "text": text(this)[:SHOWN_CHARS],
        "other_token": _token(other, tokenizer),
        "other_text": text(other)[:SHOWN_CHARS],
        "difference": kind if kind in _NAMED_KINDS else None,
        "repeated_tokens": near["repeated_tokens"],
    }


def _token(token_ids: Sequence[int], tokenizer: Tokenizer) -> Json | None:
    return {"id": token_ids[0], "text": token_text_or_bytes(tokenizer, token_ids[0])} if token_ids else None


def _cached_sentence(answer: Json) -> str:
    """Return a sentence about the number of cached tokens and their sources."""
    then, now, total = answer["sources"], answer["now"], answer["prompt_tokens"]
    if then is None and answer["status"] in (None, "waiting"):
        return f"{_cached(now, total)} would be cached if it began now{_by_source(now)}."
    if then is None:
        return f"{answer['reused_tokens']:,} of {total:,} prompt tokens were cached when it began."
    text = f"{_cached(then, total)} were cached{_by_source(then)}."
    if now["cached_tokens"] != then["cached_tokens"]:
        text += f" If it came again now, {now['cached_tokens']:,} would be."
    return text


def _cached(sources: Json, total: int) -> str:
    return f"{sources['cached_tokens']:,} of {total:,} prompt tokens"


def _by_source(sources: Json) -> str:
    named = {"pinned": "pinned", "shared": "shared", "store": "from the store", "followed": "followed"}
    parts = [f"{sources[f'{key}_tokens']:,} {name}" for key, name in named.items() if sources[f"{key}_tokens"]]
    return f" ({', '.join(parts)})" if parts else ""


def _reason_sentence(answer: Json) -> str:
    """Return a sentence about why there were no more prefix cache hits."""
    reason = _REASONS[answer["reason"]]
    return reason if isinstance(reason, str) else reason(answer)


def _diverged(answer: Json) -> str:
    near, size = answer["near_match"], answer["block_size"]
    common, other = near["common_tokens"], near["other_token"]
    head = f"It shares its first {_tokens(common)} with {_named(near['request_id'])}"
    if other is None:
        tail = f", which ends there: what follows is new, from token {common + 1:,} on"
    else:
        tail = (
            f"; then token {common + 1:,} differs: that one had {other['text']!r}, this one {near['token']['text']!r}"
        )
    lost = common - answer["reused_tokens"]
    last = "" if other else ", and the last token of an answer is never computed"
    whole = f" Of these {lost:,} did not count: blocks of {size} tokens are shared whole{last}." if lost else ""
    return f"{head}{tail}.{_cost(near)}{whole}"


def _cost(near: Json) -> str:
    """Return sentences about what a difference is and costs; empty if neither is known."""
    kind, repeated = near["difference"], near["repeated_tokens"]
    seems = f" It seems to be {KINDS[kind]}." if kind is not None else ""
    if not repeated:
        return seems
    return f"{seems} Behind it {_tokens(repeated)} stand in both prompts, and are computed again because of it."


def _evicted(answer: Json) -> str:
    eviction = answer["eviction"]
    by = _named(eviction["by"]) if eviction["by"] else "another tenant" if eviction["by_another_tenant"] else ""
    if eviction["by_tenant"]:
        by = f"{by or 'a request'} of tenant {eviction['by_tenant']}"
    for_whom = f" for {by}" if by and eviction["cause"] == "capacity" else f" ({by})" if by else ""
    ago = _ago(eviction["seconds_ago"])
    return (
        f"The blocks from token {answer['reused_tokens'] + 1:,} on were {_CAUSES[eviction['cause']]}{for_whom} {ago}."
    )


def _computing(answer: Json) -> str:
    near = answer["near_match"]
    who = _sentence(near["request_id"]) if near else "Another request"
    return f"{who} has the same tokens from token {answer['reused_tokens'] + 1:,} on and was still computing them."


def _equal(ending: str) -> Callable[[Json], str]:
    def sentence(answer: Json) -> str:
        near = answer["near_match"]
        return f"{_sentence(near['request_id'])} had the same first {_tokens(near['common_tokens'])}, {ending}."

    return sentence


def _tail(answer: Json) -> str:
    rest = "The rest" if answer["reused_tokens"] else "A prompt this short"
    return f"{rest} does not fill a block of {answer['block_size']} tokens, and blocks are shared whole."


def _no_checkpoint(answer: Json) -> str:
    reused = f"behind token {answer['reused_tokens']:,}" if answer["reused_tokens"] else "of these tokens"
    return (
        f"Keys and values {reused} are there, but no state of the recurrent layers: one is kept when they are computed."
    )


def _unseen(answer: Json) -> str:
    if answer["reused_tokens"]:
        return f"No recent request goes on like this one after token {answer['reused_tokens']:,}: the rest is new."
    near, size = answer["near_match"], answer["block_size"]
    if near is None:
        return "No recent request begins like this one."
    nearest = f"the nearest, {_named(near['request_id'])}, shares its first {_tokens(near['common_tokens'])}"
    text = f"No recent request begins with the same block of {size} tokens; {nearest}, and blocks are shared whole."
    return text + _cost(near)


_REASONS: Mapping[str, str | Callable[[Json], str]] = {
    "complete": "Everything was there; the last token is always computed, because the answer begins from it.",
    "tail": _tail,
    "disabled": "The server runs without prefix caching (--no-enable-prefix-caching).",
    "bypass": "The request bypasses the cache.",
    "prompt_logprobs": "Log-probabilities of the prompt were requested, and these must be computed.",
    "no_checkpoint": _no_checkpoint,
    "evicted": _evicted,
    "computing": _computing,
    "diverged": _diverged,
    "extends": _diverged,
    "isolated": _equal("but in another isolation domain: another tenant, cache_salt or adapter"),
    "not_kept": _equal("but its cache mode keeps nothing in the cache"),
    "gone": _equal("but its blocks are no longer there, and why is no longer known"),
    "never_seen": _unseen,
}


def _texts(near: Json | None) -> str:
    if near is None or near["other_token"] is None or near["token"] is None:
        return ""
    return f"\n  both:  {near['text_before']!r}\n  that:  {near['other_text']!r}\n  this:  {near['text']!r}"


def _named(request_id: str) -> str:
    """Return the name of a request for people; a request that computes a pinned prefix has the prefix's name."""
    if request_id.startswith(REQUEST_PREFIX):
        return f"the pinned prefix {request_id.removeprefix(REQUEST_PREFIX).rpartition(':')[0]!r}"
    return f"request {request_id}"


def _sentence(request_id: str) -> str:
    named = _named(request_id)
    return named[0].upper() + named[1:]


def _tokens(count: int) -> str:
    return f"{count:,} token{'' if count == 1 else 's'}"


def _ago(seconds: float) -> str:
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
