"""The router of LiteLLM's plug-in, without LiteLLM."""

import pytest

from headstart.router.routing_request import ReportedTokenUsage
from headstart_plugins.litellm import prefix_router
from headstart_plugins.litellm.prefix_router import CallProgress, PrefixRouter, PromptKey

SERVERS = ("http://a/v1", "http://b/v1")
LONG = "You are a careful assistant who answers in short sentences. " * 40


def chat(*texts: str) -> PromptKey:
    roles = ("system", "user", "assistant")
    messages = [{"role": roles[min(at, 1 + (at + 1) % 2)], "content": text} for at, text in enumerate(texts)]
    return PromptKey.of("m", {"messages": messages})


def ask(router: PrefixRouter, key: PromptKey, now: float, call: str = "c", cached: int | None = None) -> str:
    """Route, send and finish a request; return the server."""
    server = router.pick("m", key, SERVERS, now)
    router.record_sent(call, "m", key, server, now)
    usage = None if cached is None else ReportedTokenUsage(len(key.body) // 4, cached)
    router.record_finished(call, now + 0.1, usage, num_output=4)
    return server


def test_requests_with_one_beginning_go_to_one_server() -> None:
    router = PrefixRouter()
    first = ask(router, chat(LONG, "one"), 0.0)
    assert {ask(router, chat(LONG, f"question {n}"), 1.0 + n) for n in range(8)} == {first}


def test_different_beginnings_use_both_servers() -> None:
    router = PrefixRouter()
    assert {ask(router, chat(f"{n} {LONG}", "one"), float(n)) for n in range(16)} == set(SERVERS)


def test_a_server_without_the_reported_prefix_loses_it() -> None:
    router = PrefixRouter()
    key = chat(LONG, "one")
    first = ask(router, key, 0.0)
    router.record_sent("again", "m", key, first, 1.0)
    router.record_finished(
        "again", 1.1, ReportedTokenUsage(len(key.body) // 4, 0), num_output=4
    )  # nothing was cached: it was emptied
    index = router.router.endpoints[first].index
    predicted = index.num_cached_prefix_blocks(router._prompt(chat(LONG, "two")).block_hashes(16))
    assert index.num_flushes == 1  # type: ignore[attr-defined]
    assert predicted <= len(key.body) // 64


def test_a_retry_goes_to_a_server_that_has_not_failed_the_request() -> None:
    router, key = PrefixRouter(), chat(LONG, "one")
    first = router.pick("m", key, SERVERS, 0.0, trace="t")
    router.record_sent("c1", "m", key, first, 0.0, trace="t")
    router.record_failed("c1", 0.1)
    second = router.pick("m", key, SERVERS, 0.2, trace="t")
    assert second != first
    router.record_sent("c2", "m", key, second, 0.2, trace="t")
    router.record_failed("c2", 0.3)
    assert router.pick("m", key, SERVERS, 0.4, trace="t") in SERVERS  # all failed it: any may be tried


def test_a_server_that_refuses_a_client_is_not_blamed() -> None:
    router, key = PrefixRouter(), chat(LONG, "one")
    first = ask(router, key, 0.0)
    for n in range(5):
        router.record_sent(f"c{n}", "m", key, first, 1.0 + n, trace=str(n))
        router.record_failed(f"c{n}", 1.5 + n, blame=False)
    assert router.pick("m", key, SERVERS, 9.0) == first


def test_load_outweighs_a_short_prefix() -> None:
    router, key = PrefixRouter(), chat("Be brief. " * 10, "one")
    first = ask(router, key, 0.0)
    for n in range(20):
        router.record_sent(f"long {n}", "m", chat(f"{n} {LONG * 20}", "one"), first, 1.0)
    assert router.pick("m", key, SERVERS, 1.0) != first


def test_lost_calls_leave_no_load() -> None:
    router, key = PrefixRouter(), chat(LONG, "one")
    states = [CallProgress()]
    router.record_sent("c", "m", key, SERVERS[0], 0.0, progress=lambda: states[0], is_stream=True)
    assert router.router.endpoints[SERVERS[0]].load.num_requests == 1
    states[0] = CallProgress(is_lost=True)
    router.pick("m", key, SERVERS, 1.0)
    assert router.num_calls == 0
    assert router.router.endpoints[SERVERS[0]].load.num_requests == 0


def test_first_tokens_of_streams_are_seen_at_their_time() -> None:
    router, key = PrefixRouter(), chat(LONG, "one")
    states = [CallProgress()]
    router.record_sent("c", "m", key, SERVERS[0], 0.0, progress=lambda: states[0], is_stream=True)
    load = router.router.endpoints[SERVERS[0]].load
    router.pick("m", key, SERVERS, 3.0)
    assert load.num_awaiting_first_token == 1
    states[0] = CallProgress(first_token_at=4.0)
    router.pick("m", key, SERVERS, 5.0)
    assert (load.num_awaiting_first_token, load.num_streams) == (0, 1)
    router.record_finished("c", 6.0, num_output=4)
    assert load.num_requests == 0


def test_calls_that_never_end_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_router, "MAX_CALLS", 4)
    router, key = PrefixRouter(), chat("x")
    for n in range(6):
        router.record_sent(str(n), "m", key, SERVERS[0], 0.0)
    assert router.num_calls == router.router.endpoints[SERVERS[0]].load.num_requests == 4


def test_servers_that_are_gone_are_forgotten() -> None:
    router, key = PrefixRouter(), chat(LONG)
    router.pick("m", key, ("http://old/v1", SERVERS[0]), 0.0)
    router.pick("m", key, SERVERS, 10_000.0)
    assert set(router.router.endpoints) == set(SERVERS)


def test_prompts_of_all_apis_are_read() -> None:
    part = {"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}
    plain = PromptKey.of("m", {"messages": [{"role": "user", "content": "hello"}]})
    assert plain == PromptKey.of("m", {"messages": [{"role": "user", "content": [part]}]})
    assert plain == PromptKey.of("m", {"input": "hello"})
    assert PromptKey.of("m", {"prompt": "hello"}).body == b"hello"
    assert PromptKey.of("m", {"prompt": ["hello", "other"]}).body == b"hello"
    tokens = PromptKey.of("m", {"prompt": [1, -2, 3]})
    assert list(tokens.prompt().token_ids) == [1, -2, 3] and tokens.prompt().exact
    system = {"system": "be brief", "messages": [{"role": "user", "content": "hello"}]}
    assert PromptKey.of("m", system).body.startswith(b"<system>\nbe brief")
    assert PromptKey.of("m", {"input": [{"type": "function_call", "name": "f"}, "text"]}).body


def test_models_and_salts_share_nothing() -> None:
    values = {"messages": [{"role": "user", "content": "hello"}]}
    keys = [PromptKey.of("m", values), PromptKey.of("n", values), PromptKey.of("m", {**values, "cache_salt": "s"})]
    assert len({key.root for key in keys}) == 3
    assert PromptKey.of("m", {**values, "extra_body": {"cache_salt": "s"}}) == keys[2]
