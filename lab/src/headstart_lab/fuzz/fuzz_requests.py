"""Request generators of the fuzz: mutated bodies, expensive bodies, broken HTTP. All use a seeded random generator."""

import copy
import json
import random
from collections.abc import Callable
from typing import Any, NamedTuple

from headstart_lab.fuzz.legal_requests import draw_chat, draw_completion, text, token_ids

Json = dict[str, Any]
CONTEXT = 2048  # of the bundled model
NASTY: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 0.5, -0.0, 1e-38, 1e308, -1e308, 2**31, 2**63, -(2**63) - 1, 10**400, "", "a"),
    *("\u0000", "x" * 5000, "\ud7ff\ue000", "🙂" * 99, [], {}, [[]], [None], {"": None}, [1, "a"], {"type": "text"}),
    *("{{ 7*7 }}", "../../etc/passwd", "<|end|><|system|>", [[[[[[]]]]]], [0] * 3000, "1e999", "NaN"),
)


class Post(NamedTuple):
    """One request, sent completely. With `hang_up`, the client disconnects after that many bytes of the response."""

    path: str
    body: bytes
    hang_up: int | None = None


def legal(rng: random.Random) -> tuple[str, Json]:
    """Return the path and body of a request that vLLM's documentation allows."""
    if rng.random() < 0.5:
        return "/v1/completions", draw_completion(rng)
    return "/v1/chat/completions", draw_chat(rng)


def cheap(body: Json) -> Json:
    """Return the body with a short output, so that a run of 100,000 requests ends in reasonable time."""
    return body | {"max_tokens": min(body.get("max_tokens") or 4, 4), "min_tokens": 0, "n": min(body.get("n") or 1, 4)}


def mutated(rng: random.Random) -> Post:
    """Return a legal request with one to three changes: of a value, a field name or a byte."""
    path, body = legal(rng)
    body = copy.deepcopy(cheap(body))
    body.pop("max_completion_tokens", None)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        _mutate(rng, body)
    data = bytearray(json.dumps(body).encode())
    if rng.random() < 0.15:
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
    if rng.random() < 0.03:
        del data[rng.randrange(len(data)) :]
    other = ("/tokenize", "/detokenize", "/v1/cache/explain", "/v1/embeddings", "/v1/responses", "/v1/prefixes")
    return Post(rng.choice(other) if rng.random() < 0.12 else path, bytes(data))


def _mutate(rng: random.Random, body: Json) -> None:
    """Change one place of a JSON object, at any depth."""
    place: Any = body
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            return
        key = rng.choice(keys)
        if isinstance(place[key], dict | list) and place[key] and rng.random() < 0.6:
            place = place[key]
            continue
        if isinstance(place, dict) and rng.random() < 0.15:
            place[rng.choice(("", "tools", "n", "stop", "unheard_of", "logprobs", "x" * 400))] = rng.choice(NASTY)
        elif rng.random() < 0.1:
            del place[key]
        else:
            place[key] = copy.deepcopy(rng.choice(NASTY))
        return


def disconnected(rng: random.Random) -> Post:
    """Return a legal request whose client disconnects during the response."""
    path, body = legal(rng)
    return Post(path, json.dumps(cheap(body) | {"stream": True}).encode(), rng.choice((0, 1, 500, 5000)))


def expensive(rng: random.Random) -> Post:
    """Return a request that is as large, or as expensive, as the parameters allow."""
    prompts = [token_ids(rng, 300) for _ in range(rng.choice((1, 8, 64)))]
    many: Json = {"echo": True, "logprobs": 20, "n": rng.choice((1, 16, 128)), "max_tokens": rng.choice((0, 1, 16))}
    deep = rng.choice((b"[", b'{"a":')) * rng.choice((100, 100_000))
    makers: tuple[Callable[[], tuple[str, Any]], ...] = (
        lambda: ("/v1/completions", {"prompt": prompts, **many}),
        lambda: ("/v1/completions", {"prompt": [text(rng, 300)] * 8, **many, "prompt_logprobs": 20}),
        lambda: ("/v1/completions", {"prompt": text(rng, 200), "max_tokens": 8, "stream": True, **many}),
        lambda: ("/v1/completions", {"prompt": [0] * 1_900_000}),
        lambda: ("/v1/completions", {"prompt": [[1]] * 700_000}),
        lambda: ("/v1/completions", {"prompt": "a " * 1_900_000}),
        lambda: ("/v1/completions", {"prompt": "a", "logit_bias": {str(i): 1 for i in range(300_000)}}),
        lambda: ("/v1/completions", {"prompt": "a", "stop": ["x" * 256] * 16_000}),
        lambda: ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}] * 90_000}),
        lambda: ("/v1/chat/completions", {"messages": [{"role": "user", "content": "é" * 1_900_000}]}),
        lambda: (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 99_999}]},
        ),
        lambda: ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "x" * 99: [[]] * 1_300_000}),
        lambda: ("/tokenize", {"prompt": "word " * 700_000, "return_token_strs": True}),
        lambda: ("/detokenize", {"tokens": [5] * 1_900_000}),
        lambda: ("/v1/completions", deep),
        lambda: ("/v1/completions", b'{"prompt": ' + b"[" * 1_900_000 + b"]" * 1_900_000 + b"}"),
        lambda: ("/v1/completions", b" " * 5_000_000),
    )
    path, body = rng.choice(makers)()
    return Post(
        path, body if isinstance(body, bytes) else json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()
    )


SLOW_NUMBERS = ("1e308", "-1e308", "1e-320", "1" * 19 + "e289", "2.2250738585072011e-308", "9" * 4000, "0." + "3" * 900)
THOUGHT = "a thought that the chat template drops. "


def numbers(rng: random.Random) -> Post:
    """Return a request with many numbers that are slow to read, wherever a request may have some."""
    number = rng.choice(SLOW_NUMBERS)
    listed = ",".join([number] * (rng.choice((10_000, 400_000, 2_300_000)) // (len(number) + 1)))
    chat = '"messages": [{"role": "user", "content": "a"}], "max_tokens": 1'
    makers: tuple[tuple[str, str], ...] = (
        ("/v1/completions", f'{{"prompt": [{listed}]}}'),
        ("/v1/completions", f'{{"prompt": "a", "max_tokens": 1, "logit_bias": {{"1": {number}}}, "x": [{listed}]}}'),
        ("/v1/chat/completions", f'{{{chat}, "metadata": {{"a": [{listed}]}}}}'),
        ("/v1/chat/completions", f'{{{chat}, "temperature": {number}}}'),
        ("/v1/responses", f'{{"input": "a", "max_output_tokens": 1, "metadata": {{"a": [{listed}]}}}}'),
        ("/v1/messages", f'{{"model": "x", {chat}, "metadata": {{"a": [{listed}]}}}}'),
        ("/tokenize", f'{{"prompt": "a", "x": [{listed}]}}'),
        ("/detokenize", f'{{"tokens": [{listed}]}}'),
        ("/v1/cache/explain", f'{{"prompt": "a", "x": [{listed}]}}'),
    )
    path, body = rng.choice(makers)
    return Post(path, body.encode())


def continued(rng: random.Random, ids: "list[str]") -> Post:
    """Return a response that continues or refers to one of the stored `ids`, sometimes with long thoughts."""
    items: list[Any] = [{"role": "user", "content": text(rng, 8)}]
    if rng.random() < 0.3:
        thought = {"type": "reasoning_text", "text": THOUGHT * rng.choice((10, 2_000, 40_000))}
        items.insert(0, {"type": "reasoning", "summary": [], "content": [thought]})
    body: Json = {"input": items, "max_output_tokens": rng.choice((1, 4)), "store": rng.random() < 0.8}
    if ids and rng.random() < 0.9:
        body["previous_response_id"] = rng.choice(ids)
    if ids and rng.random() < 0.2:
        number = rng.choice(ids).rpartition("_")[2]
        items.insert(0, {"type": "item_reference", "id": f"msg_{number}{rng.randrange(2):02x}"})
    return Post("/v1/responses", json.dumps(body).encode(), rng.choice((None, None, None, 0)))


def reasoning(rng: random.Random) -> Post:
    """Return a chat with long reasoning in its history, and perhaps with calls."""
    thought = THOUGHT * rng.choice((1, 1_000, 50_000))
    turn: Json = {"role": "assistant", "content": "b", "reasoning_content": thought}
    if rng.random() < 0.3:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps({"x": thought[:400]})}}
        turn |= {"tool_calls": [call]}
    messages = [{"role": "user", "content": text(rng, 4)}, turn, {"role": "user", "content": text(rng, 4)}]
    body = {"messages": messages, "max_tokens": rng.choice((1, 8)), "stream": rng.random() < 0.5}
    return Post("/v1/chat/completions", json.dumps(body).encode(), rng.choice((None, None, 0, 200)))


def token_grammar(rng: random.Random) -> Post:
    """Return a request with a grammar in Lark: of token ids, of JSON Schemas, of both, and of neither."""
    ids = ",".join(str(rng.randrange(-1, 1600)) for _ in range(rng.randint(1, 6)))
    schema = rng.choice(
        (
            {"type": "object", "properties": {f"n{rng.randrange(99)}": {"type": "integer"}}},
            {"type": "number", "multipleOf": rng.choice((0.5, 999_983, 1_000_000_007))},
            {"type": "string", "pattern": rng.choice(("a{3}", "(a{300}){300}", ".*a.{15}"))},
            {"enum": [f"v{index}" for index in range(rng.choice((3, 2000)))]},
            {"$ref": "#"},
            {"type": "string", "x-guidance": {"lenient": True}},
        )
    )
    parts = (
        f"<[{ids}]>",
        f"<[^{ids}]>",
        f"%json {json.dumps(schema)}",
        '"%json {"',
        "/[a-z]{1,9}/",
        f"<[{ids}]>{{2,9}}",
    )
    lines = [f"r{index}: {rng.choice(parts)}" for index in range(rng.randint(1, 3))]
    grammar = "start: " + " ".join(f"r{index}" for index in range(len(lines))) + "\n" + "\n".join(lines)
    wanted: Json = rng.choice(({"structured_outputs": {"grammar": grammar}}, {"guided_grammar": grammar}))
    asked = {"messages": [{"role": "user", "content": text(rng, 4)}], "max_tokens": 8, **wanted}
    return Post("/v1/chat/completions", json.dumps(asked).encode(), rng.choice((None, None, None, 0)))


def broken_http(rng: random.Random, key: str) -> bytes:
    """Return the bytes of an almost valid request: broken heads, chunks, trailers and pipelines."""
    good = b'{"prompt": "a", "max_tokens": 1}'
    auth = f"authorization: Bearer {key}\r\n".encode() if rng.random() < 0.7 else b""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n" + auth
    chunked = head + b"transfer-encoding: chunked\r\n\r\n"
    chunk = b"%x\r\n%s\r\n" % (len(good), good)
    makers: tuple[Callable[[], bytes], ...] = (
        lambda: chunked + chunk + b"0\r\n" + b"x-trailer: y\r\n" * rng.choice((1, 100, 20_000)) + b"\r\n",
        lambda: chunked + chunk + b"0\r\nauthorization: Bearer " + key.encode() + b"\r\n\r\n",
        lambda: chunked + b"%x;%s\r\n%s\r\n0\r\n\r\n" % (len(good), b"e" * rng.choice((1, 100_000)), good),
        lambda: chunked + b"fffffffffffffffff\r\n" + good,
        lambda: chunked + b"zz\r\n",
        lambda: chunked + b"1\r\n{\r\n" * rng.choice((1, 5000)),
        lambda: head + b"content-length: 10\r\ntransfer-encoding: chunked\r\n\r\n" + chunk + b"0\r\n\r\n",
        lambda: head + b"content-length: 10\r\ncontent-length: 11\r\n\r\n" + good,
        lambda: head + b"content-length: -1\r\n\r\n" + good,
        lambda: head + b"content-length: 99999999999999999999\r\n\r\n" + good,
        lambda: head + b"content-length: %d\r\n\r\n" % (len(good) + 9) + good,
        lambda: head + b"x: " + b"y" * rng.choice((70_000, 200_000)) + b"\r\n\r\n",
        lambda: head + b"x%d: y\r\n" % rng.randrange(99) * 3000 + b"\r\n",
        lambda: head + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(good) + good,
        lambda: head + b"connection: upgrade\r\nupgrade: websocket\r\ncontent-length: 0\r\n\r\n",
        lambda: head + b"content-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(good) + good,
        lambda: (head + b"content-length: %d\r\n\r\n" % len(good) + good) * rng.choice((2, 30)),
        lambda: b"GET /livez HTTP/1.1\r\nhost: a\r\n\r\n" * rng.choice((2, 300)),
        lambda: b"GET /v1/models/" + b"%2e%2e/" * 50 + b" HTTP/1.1\r\nhost: a\r\n" + auth + b"\r\n",
        lambda: b"GET / HTTP/1.1\r\n" + bytes(rng.randrange(256) for _ in range(200)),
        lambda: bytes(rng.randrange(256) for _ in range(rng.randrange(500))),
        lambda: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        lambda: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(99),
        lambda: head[: rng.randrange(len(head))],
        lambda: (chunked + chunk)[: rng.randrange(len(chunked + chunk))],
    )
    return rng.choice(makers)()
