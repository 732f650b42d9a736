"""Bodies on their way in: which prompt they hold, whose it is, and that they are changed no more than they must be."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_folders import BYTE_LEVEL, write

from headstart.bundled import bundled_intent_model_folder
from headstart.core.cache.hashing import hash_block_chain
from headstart.core.errors import InvalidRequestError
from headstart.gateway.proxy.request_reader import (
    ParsedRequest,
    RequestParser,
    ResolvedModelName,
    SenderRoutingInfo,
    has_endless_word,
    session_from_headers,
)
from headstart.gateway.replicas.probes import ModelCard
from headstart.openai.bounds import RequestBounds
from headstart.openai.chat.chat_renderer import ChatRenderer
from headstart.openai.engine_requests import RequestOrigin, build_chat_requests
from headstart.openai.request_bodies import parse_chat
from headstart.openai.tokenizer.tokenizer import Tokenizer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LEGAL_SALT = re.compile(r"[A-Za-z0-9+/=_-]{1,128}")  # of our own servers; vLLM and SGLang take any text
MESSAGES = [{"role": "system", "content": "You name intents."}, {"role": "user", "content": "turn on the light"}]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(bundled_intent_model_folder())


def read(
    body: dict[str, Any], path: str = COMPLETIONS, reader: RequestParser | None = None, **sender: Any
) -> ParsedRequest:
    return (reader or RequestParser()).read(path, json.dumps(body).encode(), SenderRoutingInfo(**sender))


def shared(one: ParsedRequest, other: ParsedRequest, size: int = 1) -> int:
    """Return the number of leading blocks that two prompts share."""
    names = zip(one.request.prompt.block_hashes(size), other.request.prompt.block_hashes(size), strict=False)
    return next(
        (i for i, (a, b) in enumerate(names) if a != b),
        min(one.request.prompt.num_tokens, other.request.prompt.num_tokens),
    )


def test_the_prompt_is_counted_in_the_replicas_tokens_where_their_tokenizer_is_here(tokenizer: Tokenizer) -> None:
    reader = RequestParser(tokenizer)
    text = "turn on the light in the kitchen"
    completion = read({"prompt": text}, reader=reader)
    assert completion.request.prompt.exact and completion.request.prompt.num_tokens == len(tokenizer.encode(text))
    chat = read({"messages": MESSAGES}, CHAT, reader)
    rendered = tokenizer.render_chat_text([dict(message) for message in MESSAGES])
    assert (
        chat.request.prompt.num_tokens == len(tokenizer.encode(rendered, add_special_tokens=False))
        and chat.request.prompt.exact
    )


def test_a_chat_with_tools_is_rendered_as_the_replica_renders_it(tmp_path: Path) -> None:
    template = "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}"
    folder = write(tmp_path / "model", BYTE_LEVEL, chat_template=template)
    tokenizer = Tokenizer.from_folder(folder)
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {"messages": MESSAGES, "tools": tools, "tool_choice": "auto"}
    routed = read(body, CHAT, RequestParser(tokenizer)).request.prompt
    bounds = RequestBounds(10**6, 4096, content_forms=tokenizer.content_forms)
    _, requests = build_chat_requests(parse_chat(body, bounds), tokenizer, bounds, RequestOrigin("x"))
    assert routed.exact and list(routed.token_ids) == list(requests[0].prompt)
    assert tokenizer.decode(requests[0].prompt).startswith('[{"type": "function", "function": {"name": "f"}}]')


def test_without_a_tokenizer_equal_beginnings_are_equal_bytes() -> None:
    long = "a preamble that all share, " * 20
    one, other = read({"prompt": long + "one"}), read({"prompt": long + "other"})
    assert not one.request.prompt.exact and shared(one, other) == len(long) // 4
    first = [{"role": "system", "content": long}, {"role": "user", "content": "x"}]
    second = [{"role": "system", "content": long}, {"role": "user", "content": "y"}]
    assert shared(read({"messages": first}, CHAT), read({"messages": second}, CHAT)) >= len(long) // 4
    tools = read({"messages": first, "tools": [{"type": "function"}]}, CHAT)
    assert shared(tools, read({"messages": first}, CHAT)) == 0, "tools are rendered before all messages"


@given(
    unit=st.sampled_from(["é", "a", "9", "!", " ", "\n", "語", "。"]),
    before=st.integers(0, 70_000),
    length=st.integers(65_536, 140_000),
    after=st.integers(0, 70_000),
)
def test_an_endless_word_is_found_wherever_it_is(unit: str, before: int, length: int, after: int) -> None:
    words = "some words, 語。 "
    text = (words * 9000)[:before] + unit * length + (words * 9000)[:after]
    assert has_endless_word(text)
    assert not has_endless_word((words * 9000)[:before] + unit * 30_000 + words * after)


def test_a_prompt_with_an_endless_word_is_routed_by_its_bytes(tokenizer: Tokenizer) -> None:
    reader, word = RequestParser(tokenizer), "é" * 70_000
    assert not read({"prompt": word}, reader=reader).request.prompt.exact
    assert not read({"messages": [{"role": "user", "content": word}]}, CHAT, reader).request.prompt.exact
    assert read({"prompt": "é " * 30_000}, reader=reader).request.prompt.exact


def test_token_ids_are_exact_and_need_no_tokenizer() -> None:
    reading = read({"prompt": [5, 6, 7]})
    assert reading.request.prompt.exact and reading.request.prompt.num_tokens == 3 and reading.text is None
    several = read({"prompt": [[5, 6, 7], [1]]})
    assert several.request.prompt.num_tokens == 3 and not several.is_single
    assert read({"prompt": ["ab", "c"]}).text == "ab"


@pytest.mark.parametrize("prompt", [None, 7, [], [[]], [None], [1, "x"], [2**40], [{}], {"a": 1}, [[1, None]]])
def test_prompts_that_are_none_are_left_to_the_replica(prompt: Any, tokenizer: Tokenizer) -> None:
    for reader in (RequestParser(), RequestParser(tokenizer)):
        body = {"prompt": prompt, "temperature": "hot"}
        assert read(body, reader=reader).body == json.dumps(body).encode()
        assert read({"messages": prompt}, CHAT, reader).body == json.dumps({"messages": prompt}).encode()


def test_fields_another_engine_knows_do_not_keep_a_prompt_from_being_counted(tokenizer: Tokenizer) -> None:
    body = {"prompt": "turn on the light", "guided_regex": "a*", "temperature": 99}
    assert read(body, reader=RequestParser(tokenizer)).body == json.dumps(body).encode()


def test_a_stream_is_asked_for_its_usage_without_another_byte_changed() -> None:
    body = b' {"stream" : true, "prompt": "\\u00e9", "big": 12345678901234567890, "x": 1.10}'
    reading = RequestParser().read(COMPLETIONS, body, SenderRoutingInfo())
    assert reading.body == b'{"stream_options":{"include_usage":true},' + body[2:] and reading.hides_usage
    assert json.loads(reading.body) == {**json.loads(body), "stream_options": {"include_usage": True}}


@pytest.mark.parametrize(
    ("options", "hides"),
    [(None, True), ({}, True), ({"include_usage": False}, True), ({"include_usage": True}, False), (7, False)],
)
def test_options_of_a_stream_are_kept_and_completed(options: Any, hides: bool) -> None:
    body = {"prompt": "x", "stream": True, "stream_options": options}
    reading = read(body)
    assert reading.hides_usage == hides and reading.stream
    told = json.loads(reading.body)["stream_options"]
    assert told == ({**(options or {}), "include_usage": True} if hides else options)


def test_what_is_no_stream_is_sent_on_as_it_is() -> None:
    for body in ({"prompt": "x", "stream": False}, {"prompt": "x", "stream": None}, {"prompt": "x", "stream": 1}):
        reading = read(body)
        assert reading.body == json.dumps(body).encode() and not reading.stream


def test_no_client_names_the_server_that_a_replica_gets_kv_from() -> None:
    with pytest.raises(InvalidRequestError, match="kv_transfer_params is not supported") as caught:
        read({"prompt": "x", "kv_transfer_params": {"do_remote_prefill": True, "remote_host": "10.0.0.1"}})
    assert caught.value.param == "kv_transfer_params"
    for off in (None, {}):
        assert read({"prompt": "x", "kv_transfer_params": off}).request.prompt.num_tokens == 1


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'"x"', b"\xff", b"[" * 100_000, b"null"])
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        RequestParser().read(COMPLETIONS, body, SenderRoutingInfo())


def test_domains_adapters_and_models_share_nothing() -> None:
    reader = RequestParser()
    reader.served = {
        "m": ResolvedModelName("m"),
        "tuned": ResolvedModelName("m", "tuned"),
        "other": ResolvedModelName("other"),
    }
    prompt = {"prompt": [1] * 8}
    plain = read({**prompt, "model": "m"}, reader=reader)
    strangers = [
        read({**prompt, "model": "tuned"}, reader=reader),
        read({**prompt, "model": "other"}, reader=reader),
        read({**prompt, "model": "m", "cache_salt": "s"}, reader=reader),
        read({**prompt, "model": "m"}, reader=reader, domain=b"t"),
        read({**prompt, "model": "m", "cache_salt": "s"}, reader=reader, domain=b"t"),
    ]
    everybody = [plain, *strangers]
    assert all(shared(a, b) == 0 for a in everybody for b in everybody if a is not b)
    assert strangers[0].request.adapter == "tuned" and plain.request.adapter is None
    reader.default_model = "m"
    assert shared(read(prompt, reader=reader), plain) == 8


def test_a_model_with_ollamas_tag_is_the_one_without() -> None:
    reader = RequestParser()
    reader.served = {"m": ResolvedModelName("m"), "n:latest": ResolvedModelName("n")}
    for name, expected in (("m:latest", "m"), ("m", "m"), ("n:latest", "n:latest")):
        assert (
            reader.read(
                "/v1/completions", json.dumps({"prompt": "a", "model": name}).encode(), SenderRoutingInfo()
            ).request.model
            == expected
        )


def test_a_prompt_that_no_replica_takes_is_routed_by_its_beginning() -> None:
    reader = RequestParser(Tokenizer.from_folder(bundled_intent_model_folder()))
    reader.served = {"m": ResolvedModelName("m", max_model_len=8)}
    for prompt in ([5] * 100, [[5] * 100, [6]]):
        assert list(read({"prompt": prompt, "model": "m"}, reader=reader).request.prompt.token_ids) == [5] * 8
    fits = read({"prompt": "hello " * 20, "model": "m"}, reader=reader).request.prompt
    long = read({"prompt": "hello " * 200, "model": "m"}, reader=reader).request.prompt
    assert fits.exact and fits.num_tokens == 8
    assert not long.exact and long.num_tokens == 8 * 64 // 4
    reader.served = {"m": ResolvedModelName("m")}
    assert read({"prompt": "hello " * 200, "model": "m"}, reader=reader).request.prompt.exact


def test_a_body_of_more_numbers_than_fit_any_context_is_forwarded_unparsed() -> None:
    reader = RequestParser()
    reader.served = {"m": ResolvedModelName("m", max_model_len=8)}
    for extra in ({}, {"model": "m"}):
        reader.default_model = "m"
        body = json.dumps({"prompt": [5] * 200_000, "stream": True, "user": "me", **extra}).encode()
        reading = reader.read(COMPLETIONS, body, SenderRoutingInfo())
        assert reading.request.prompt.num_tokens == 0 and reading.stream and reading.request.session == "me"
        assert json.loads(reading.body)["prompt"] == [5] * 200_000
    reader.served = {"m": ResolvedModelName("m")}
    assert reader.read(COMPLETIONS, body, SenderRoutingInfo()).request.prompt.num_tokens == 200_000


def test_the_longest_context_of_a_models_replicas_counts_if_all_report_it() -> None:
    cards = [ModelCard("m", fields={"max_model_len": length}) for length in (10, 30, None)]
    assert [card.max_model_len for card in cards] == [10, 30, 0]


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_requests_that_use_no_cache_are_not_parsed_beyond_their_model(path: str) -> None:
    reader = RequestParser(Tokenizer.from_folder(bundled_intent_model_folder()))
    body = json.dumps({"prompt": "a " * 1000, "tokens": [5] * 1000, "model": "m"}).encode()
    reading = reader.read(path, body, SenderRoutingInfo(b"t", is_salted=True))
    assert reading.request.model == "m" and reading.request.prompt.num_tokens == 0 and reading.body == body
    for invalid in (b"", b"{", b"[1]", b'{"model": 5}', b"\xff", b"[" * 100_000):
        assert reader.read(path, invalid, SenderRoutingInfo()).request.model == ""


def test_an_answers_length_is_the_requests_else_the_replicas_default() -> None:
    reader = RequestParser()
    reader.served = {"m": ResolvedModelName("m", default_max_tokens=40)}
    prompt = {"prompt": [1], "model": "m"}
    nulls = {"max_tokens": None, "max_completion_tokens": None}
    found = [read({**prompt, **more}, reader=reader).request.max_tokens for more in ({}, nulls, {"max_tokens": 3})]
    assert found == [40, 40, 3]
    assert read({**prompt, "max_completion_tokens": None, "max_tokens": 3}, reader=reader).request.max_tokens == 3
    assert read({"prompt": [1], "model": "other"}, reader=reader).request.max_tokens == 0
    reader.default_model = "m"
    assert read({"prompt": [1]}, reader=reader).request.max_tokens == 40
    reader.served = {"m": ResolvedModelName("m", max_model_len=50)}
    assert read({**prompt, "max_tokens": 60}, reader=reader).request.max_tokens == 50  # /v1/messages accepts that


@pytest.mark.parametrize(
    ("told", "expected"), [({"max_tokens": 7}, 7), ({}, 0), (None, 0), ([], 0), ({"max_tokens": -1}, 0)]
)
def test_a_replicas_default_length_is_read_from_its_card(told: object, expected: int) -> None:
    assert ModelCard("m", fields={"default_sampling_params": told}).default_max_tokens == expected
    assert ModelCard("m", fields={"default_sampling_params": {"max_tokens": 10**30}}).default_max_tokens < 2**31


@given(st.text(max_size=3), st.text(max_size=3), st.booleans(), st.booleans())
def test_two_domains_are_one_only_if_tenant_and_salt_are_the_same(one: str, other: str, a: bool, b: bool) -> None:
    first = read({"prompt": [1, 2], "cache_salt": one}, domain=b"t" if a else b"")
    second = read({"prompt": [1, 2], "cache_salt": other}, domain=b"t" if b else b"")
    assert (shared(first, second) == 2) == (a == b and one == other)


def test_a_tenants_salt_is_sent_and_cannot_be_left() -> None:
    """Whatever the client's own salt is, what a replica sees is one that every engine accepts, and the tenant's own."""

    def sent(domain: bytes, **fields: Any) -> str:
        return json.loads(read({"prompt": "x", **fields}, domain=domain, is_salted=True).body)["cache_salt"]

    own, other = b"\x01" * 32, b"\x02" * 32
    salts = [
        *(
            sent(domain, cache_salt=salt)
            for domain in (own, other)
            for salt in ("mine", "s" * 128, "s" * 129, "é, a b")
        ),
        *(sent(domain) for domain in (own, other)),
        *(sent(own, cache_salt=sent(own)), sent(other, cache_salt=sent(own)), sent(own, cache_salt=own.hex())),
    ]
    assert len(set(salts)) == len(salts) and all(LEGAL_SALT.fullmatch(salt) for salt in salts)
    assert sent(own, cache_salt="mine") == sent(own, cache_salt="mine", stream=True)
    assert sent(own) == sent(own, stream=True) == sent(own, cache_salt=None) == sent(own, cache_salt="")


def test_a_salt_sent_to_replicas_is_the_one_that_prompts_are_named_by() -> None:
    """KV events name blocks by the salt their engine saw; so must the router."""
    salted = read({"prompt": [1] * 8, "cache_salt": "mine"}, domain=b"\x01" * 32, is_salted=True)
    as_sent = read(json.loads(salted.body))
    assert shared(salted, as_sent) == 8 and salted.domain == as_sent.domain


@pytest.mark.parametrize("salt", [5, ["mine"], {"a": 1}, True])
def test_a_salt_that_is_no_text_is_refused_where_it_would_be_replaced(salt: Any) -> None:
    """A replica that ignores such a value would share what the client wants kept apart."""
    assert read({"prompt": "x", "cache_salt": salt}).body == json.dumps({"prompt": "x", "cache_salt": salt}).encode()
    with pytest.raises(InvalidRequestError, match="cache_salt"):
        read({"prompt": "x", "cache_salt": salt}, domain=b"t", is_salted=True)


def test_a_session_is_of_its_tenant_alone() -> None:
    sessions = [read({"prompt": "x", "user": "u"}, domain=domain).request.session for domain in (b"", b"a", b"b")]
    assert len(set(sessions)) == 3 and sessions[0] == "u"


def test_agents_name_their_sessions_in_headers() -> None:
    names = ("x-correlation-id", "x-session-affinity", "x-claude-code-session-id", "x-session-id")
    headers = [(name.encode(), name.encode()) for name in names]
    assert [session_from_headers(headers[: count + 1]) for count in range(4)] == list(names)  # the most specific one
    assert session_from_headers([]) is None and session_from_headers([(b"x-session-id", b"")]) is None


@pytest.mark.parametrize("domain", [b"", b"tenant"])
def test_the_name_of_a_session_is_bounded(domain: bytes) -> None:
    """Policies, the explainer and the decision log keep many of them."""
    read_names = [
        read({"prompt": "x", "prompt_cache_key": "n" * 100_000}, domain=domain).request.session,
        read({"prompt": "x"}, domain=domain, session="n" * 100_000).request.session,
    ]
    assert all(name is not None and 256 <= len(name) <= 256 + 2 * len(domain) + 1 for name in read_names)


def check_no_dependence_on_sessions(make: Callable[[], RequestParser], name: str) -> None:
    """Assert that the name of a session changes neither the prompt's hashes nor its domain nor what is forwarded."""
    body = {"messages": MESSAGES, "cache_salt": "s", "stream": True}
    for sender in ({}, {"domain": b"a"}, {"domain": b"a", "is_salted": True}):
        plain, named = read(body, CHAT, make(), **sender), read(body, CHAT, make(), session=name, **sender)
        assert shared(plain, named) == plain.request.prompt.num_tokens == named.request.prompt.num_tokens
        assert (plain.domain, plain.body, plain.text) == (named.domain, named.body, named.text)
        assert replace(named.request, session=None, prompt=plain.request.prompt) == replace(plain.request, session=None)


@given(st.text(max_size=300))
def test_no_prompt_domain_or_body_depends_on_the_name_of_a_session(name: str) -> None:
    check_no_dependence_on_sessions(RequestParser, name)


def test_a_reader_that_takes_sessions_for_domains_is_found() -> None:
    class Isolating(RequestParser):
        """A planted bug."""

        def read(self, path: str, body: bytes, sender: SenderRoutingInfo) -> ParsedRequest:
            return super().read(path, body, replace(sender, domain=(sender.session or "").encode()))

    with pytest.raises(AssertionError):
        check_no_dependence_on_sessions(Isolating, "s")


def test_sessions_and_limits_are_read() -> None:
    assert read({"prompt": "x", "user": "u", "max_tokens": 7}).request.session == "u"
    assert read({"prompt": "x", "user": "u"}, session="header").request.session == "header"
    assert read({"prompt": "x", "max_tokens": 7}).request.max_tokens == 7
    assert read({"prompt": "x", "max_completion_tokens": 5, "max_tokens": 7}).request.max_tokens == 5
    assert read({"prompt": "x", "max_tokens": "many"}).request.max_tokens == 0


def test_any_other_route_is_routed_by_its_body() -> None:
    one, other = read({"input": "a" * 400}, "/v1/embeddings"), read({"input": "a" * 400 + "b"}, "/v1/embeddings")
    assert shared(one, other) > 90


def test_a_template_that_never_ends_leaves_the_prompt_to_its_text(tmp_path: Path) -> None:
    source = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    tokenizer = Tokenizer.from_folder(write(tmp_path, BYTE_LEVEL, chat_template=source))
    tokenizer._template = ChatRenderer(source, {}, max_seconds=0.1)
    for _ in range(5):  # the last ones meet the pause behind several kills
        reading = read({"messages": MESSAGES}, CHAT, RequestParser(tokenizer))
        assert not reading.request.prompt.exact and "turn on the light" in (reading.text or "")


def test_prompts_are_hashed_by_the_given_chain() -> None:
    """The router's own: compiled code, where there is some."""
    calls: list[int] = []

    def chain(parent: bytes, raw: bytes, stride: int) -> list[bytes]:
        calls.append(stride)
        return hash_block_chain(parent, raw, stride)

    body = {"prompt": list(range(40))}
    prompt = read(body, COMPLETIONS, RequestParser(chain=chain)).request.prompt
    assert prompt.block_hashes(16) == read(body, COMPLETIONS, RequestParser()).request.prompt.block_hashes(16)
    assert prompt.block_hashes_with_output(range(20), 16) and calls == [64, 64]


# ---- images ----------------------------------------------------------------------------------------------------------

IMAGE = "iVBORw0KGgo" + "A" * 2000


def with_image(api: str, data: str, more: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """Return a conversation with an image between two texts, as each API has it."""
    before, after = "Look at this picture of a lighthouse on a cliff. ", "What do you see in it, in one word?"
    if api == "/v1/messages":
        source = {"type": "base64", "media_type": "image/png", "data": data}
        image: dict[str, Any] = {"type": "image", "source": source, "cache_control": {"type": "ephemeral"}}
        texts = [{"type": "text", "text": text} for text in (before, after)]
        return {"max_tokens": 1, "messages": [{"role": "user", "content": [texts[0], image, texts[1]]}, *(more or [])]}
    url = f"data:image/png;base64,{data}"
    if api == "/v1/responses":
        parts = [{"type": "input_text", "text": before}, {"type": "input_image", "image_url": url}]
        return {"input": [{"role": "user", "content": [*parts, {"type": "input_text", "text": after}]}, *(more or [])]}
    parts = [{"type": "text", "text": before}, {"type": "image_url", "image_url": {"url": url}}]
    return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": after}]}, *(more or [])]}


@pytest.mark.parametrize("api", [CHAT, "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("has_tokenizer", [True, False])
def test_an_image_again_is_the_same_prompt_and_another_is_one_from_there_on(
    api: str, has_tokenizer: bool, tokenizer: Tokenizer
) -> None:
    reader = RequestParser(tokenizer if has_tokenizer else None)
    first, again = (read(with_image(api, IMAGE), api, reader) for _ in range(2))
    length = first.request.prompt.num_tokens
    assert length < 400 and shared(first, again) == length
    assert first.request.has_parts or not has_tokenizer
    other = read(with_image(api, IMAGE[:-1] + "B"), api, reader)
    text = read({"prompt": "Look at this picture of a lighthouse on a cliff. "}, reader=reader)
    assert text.request.prompt.num_tokens <= shared(first, other) < length - 8
    turns = [{"role": "assistant", "content": "A lighthouse."}, {"role": "user", "content": "Where is it?"}]
    later = read(with_image(api, IMAGE, turns), api, reader)
    assert shared(first, later) >= length - 8 and later.request.prompt.num_tokens > length


def test_images_at_replicas_that_read_none_are_counted_as_they_count_them(tokenizer: Tokenizer) -> None:
    reader = RequestParser(tokenizer)
    reader.served = {"m": ResolvedModelName("m", reads_parts=False)}
    routed = read({**with_image(CHAT, IMAGE), "model": "m"}, CHAT, reader).request
    bounds = RequestBounds(10**6, 4096, content_forms=tokenizer.content_forms)
    _, requests = build_chat_requests(
        parse_chat(with_image(CHAT, IMAGE), bounds), tokenizer, bounds, RequestOrigin("x")
    )
    assert list(routed.prompt.token_ids) == list(requests[0].prompt) and routed.prompt.exact and not routed.has_parts
