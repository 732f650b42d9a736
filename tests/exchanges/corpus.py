"""The requests of a recording: about 500 for each API, valid and invalid, whole and streamed, in a fixed order.

`{id:NAME}` in a path or a body stands for the id of the answer to the earlier exchange NAME.
"""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

Json = dict[str, Any]


class Exchange(NamedTuple):
    """One request. `name` is unique."""

    name: str
    method: str
    path: str
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()


def _words(text: str) -> list[str]:
    return text.split()


WRONG: tuple[Any, ...] = (None, "x", "", -1, 0.5, 1e300, 2**31, True, [], ["x"], {}, {"type": "x"})
SHARED = _words(
    """stream temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty seed logit_bias
    stop stop_token_ids include_stop_str_in_output ignore_eos skip_special_tokens chat_template_kwargs
    min_tokens priority user safety_identifier prompt_cache_options cache_salt prompt_cache_key model
    unknown_field"""
)
OPENAI = _words(
    """max_tokens max_completion_tokens n best_of stream_options prompt_logprobs echo return_token_ids logprobs
    add_special_tokens continue_final_message add_generation_prompt response_format structured_outputs
    guided_json suffix"""
)
CHAT = _words("messages tools tool_choice parallel_tool_calls top_logprobs reasoning_effort functions modalities")
RESPONSES = _words(
    """input instructions max_output_tokens tools tool_choice parallel_tool_calls text reasoning include store
    previous_response_id truncation background conversation metadata max_tool_calls prompt top_logprobs
    service_tier"""
)
MESSAGES = _words(
    """messages system tools tool_choice thinking output_config output_format cache_control max_tokens diagnostics
    stop_sequences metadata container mcp_servers service_tier betas"""
)

SCHEMA: Json = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION: Json = {"name": "weather", "description": "The weather of a city", "parameters": SCHEMA}
LONG = "The ship left the harbour in the morning and came back at night. " * 12
SYSTEM, ASKED = {"role": "system", "content": LONG}, {"role": "user", "content": "Where is the ship?"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
MANY = [SYSTEM, ASKED, {"role": "assistant", "content": "At sea."}, {"role": "user", "content": "And now?"}]
SAMPLING: tuple[Json, ...] = (
    {},
    {"temperature": 0.7, "seed": 3},
    {"temperature": 1.5, "top_k": 5, "top_p": 0.9, "seed": 4},
    {"min_p": 0.2, "temperature": 1, "seed": 9},
    {"stop": ["e"]},
    {"stop": "a", "include_stop_str_in_output": True},
    {"presence_penalty": 1.5, "frequency_penalty": -1},
    {"repetition_penalty": 1.3},
    {"logit_bias": {"5": 100}},
    {"stop_token_ids": [3, 4, 5]},
    {"ignore_eos": True, "min_tokens": 3},
    {"skip_special_tokens": False},
    {"priority": 3, "user": "u"},
    {"cache_salt": "abc"},
    {"unknown_field": 1},
)
OPENAI_ONLY: tuple[Json, ...] = (
    {"n": 2, "temperature": 1, "seed": 1},
    {"return_token_ids": True},
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "c", "schema": SCHEMA}}, "max_tokens": 24},
    {"structured_outputs": {"choice": ["yes", "no"]}},
    {"structured_outputs": {"regex": "[ab]{4}"}},
    {"structured_outputs": {"regex": "[ab"}},
    {"max_completion_tokens": 3},
)
NOT_JSON = (b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"a":NaN}', b"{}", b"[" * 2000, b'{"model":"x"')


def exchanges() -> list[Exchange]:
    """Return all requests in the order in which they are sent."""
    found = [*_completions(), *_chats(), *_responses(), *_messages(), *_other(), *_ollama()]
    assert len({one.name for one in found}) == len(found)
    return found


def _posts(group: str, path: str, bodies: list[Json], *, streams: bool = True) -> Iterator[Exchange]:
    for index, body in enumerate(bodies):
        yield Exchange(f"{group}-{index}", "POST", path, json.dumps(body).encode())
        if streams:
            yield Exchange(f"{group}-{index}-stream", "POST", path, json.dumps({**body, "stream": True}).encode())


def _wrong(group: str, path: str, base: Json, names: list[str]) -> Iterator[Exchange]:
    """Yield bodies with one field wrong or missing, some streamed, and bodies that are no JSON object."""
    for name in names:
        for index, value in enumerate(WRONG):
            body = {**base, name: value}
            if index % 4 == 3 and name != "stream":
                body["stream"] = True
            yield Exchange(f"{group}-{name}-{index}", "POST", path, json.dumps(body).encode())
    for name in base:
        left = {key: value for key, value in base.items() if key != name}
        yield Exchange(f"{group}-without-{name}", "POST", path, json.dumps(left).encode())
    for index, data in enumerate(NOT_JSON):
        yield Exchange(f"{group}-raw-{index}", "POST", path, data)
    for method in ("GET", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"):
        yield Exchange(f"{group}-{method}", method, path)


def _completions() -> Iterator[Exchange]:
    path, base = "/v1/completions", {"prompt": "The ship", "max_tokens": 5, "temperature": 0}
    prompts: list[Any] = [
        LONG,
        LONG + "x",
        ["a", "b"],
        [5, 6, 7],
        [[5, 6], [7]],
        "é漢\U0001f600",
        " ",
        "",
        [],
        [[]],
        [-1],
    ]
    bodies = [{**base, **more} for more in (*SAMPLING, *OPENAI_ONLY)]
    bodies += [{**base, "prompt": prompt} for prompt in prompts]
    bodies += [
        {**base, "logprobs": 2},
        {**base, "echo": True},
        {**base, "echo": True, "max_tokens": 0, "logprobs": 1},
        {**base, "prompt": ["a b c", "d e f"], "echo": True, "n": 2, "logprobs": 0},
        {**base, "prompt_logprobs": 1},
        {**base, "stream_options": {"include_usage": True}},
        {**base, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {**base, "max_tokens": 10**6},
        {**base, "prompt": "word " * 20000},
        {**base, "model": "headstart-intent"},
    ]
    yield from _posts("completions", path, bodies)
    yield from _wrong("completions-wrong", path, base, [*SHARED, *OPENAI, "prompt"])


def _chats() -> Iterator[Exchange]:
    path, base = "/v1/chat/completions", {"messages": [SYSTEM, ASKED], "max_tokens": 5, "temperature": 0}
    tools = {"tools": [{"type": "function", "function": FUNCTION}], "max_tokens": 48}
    histories: list[Any] = [
        MANY,
        [ASKED],
        [{"role": "developer", "content": "Be short."}, ASKED],
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}],
        [ASKED, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "user", "content": "?"}],
        [
            ASKED,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
        ],
        [{"role": "x", "content": "a"}],
        [{"role": "user"}],
        [{"content": "a"}],
        ["a"],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": ""}],
    ]
    bodies = [{**base, **more} for more in (*SAMPLING, *OPENAI_ONLY)]
    bodies += [{**base, "messages": messages} for messages in histories]
    bodies += [
        {**base, "logprobs": True, "top_logprobs": 2},
        {**base, "stream_options": {"include_usage": True}},
        {**base, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {**base, **tools},
        {**base, **tools, "tool_choice": "required"},
        {**base, **tools, "tool_choice": {"type": "function", "function": {"name": "weather"}}},
        {**base, **tools, "tool_choice": {"type": "function", "function": {"name": "other"}}},
        {**base, **tools, "tool_choice": "none"},
        {**base, **tools, "tool_choice": "required", "max_tokens": 4},
        {**base, "tools": [{"type": "function"}]},
        {**base, "max_tokens": 10**6},
        {**base, "prompt_cache_options": {"prewarm": True}},
        {**base, "chat_template_kwargs": {"enable_thinking": False}},
        {**base, "reasoning_effort": "low"},
    ]
    yield from _posts("chat", path, bodies)
    yield from _wrong("chat-wrong", path, base, [*SHARED, *OPENAI, *CHAT])


def _responses() -> Iterator[Exchange]:
    path, base = "/v1/responses", {"input": "Where is the ship?", "max_output_tokens": 5, "temperature": 0}
    tools = {"tools": [{"type": "function", **FUNCTION}], "max_output_tokens": 48}
    message = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Where is the ship?"}]}
    called = {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Rome"}'}
    inputs: list[Any] = [
        LONG,
        [message],
        [ASKED, {"role": "assistant", "content": "At sea."}, ASKED],
        [ASKED, called, {"type": "function_call_output", "call_id": "call_1", "output": "sunny"}],
        [message, {"type": "reasoning", "id": "rs_1", "summary": []}, message],
        [{"type": "web_search_call", "id": "ws_1", "status": "completed"}, message],
        [{"type": "item_reference", "id": "msg_0"}],
        [{"type": "x"}],
        [5],
        [],
        "",
    ]
    bodies = [{**base, **more} for more in SAMPLING] + [{**base, "input": value} for value in inputs]
    bodies += [
        {**base, "instructions": LONG},
        {**base, "store": False},
        {**base, **tools},
        {**base, **tools, "tool_choice": "required"},
        {**base, **tools, "tool_choice": {"type": "function", "name": "weather"}},
        {**base, "tools": [{"type": "web_search"}]},
        {**base, "text": {"format": {"type": "json_schema", "name": "c", "schema": SCHEMA}}, "max_output_tokens": 24},
        {**base, "text": {"format": {"type": "json_object"}}},
        {**base, "metadata": {"a": "b"}, "reasoning": {"effort": "low"}},
        {**base, "previous_response_id": "resp_none"},
        {**base, "previous_response_id": "{id:responses-0}", "input": "And now?"},
        {**base, "previous_response_id": "{id:responses-0-stream}", "input": "And now?", "instructions": "Be short."},
        {**base, "max_output_tokens": 10**6},
    ]
    yield from _posts("responses", path, bodies)
    for name in ("responses-0", "responses-0-stream", "responses-18", "none"):
        found = "resp_none" if name == "none" else f"{{id:{name}}}"
        for query in ("", "?stream=true", "/input_items", "/input_items?order=asc&limit=1", "/input_items?limit=0"):
            yield Exchange(f"responses-get-{name}{query}", "GET", f"{path}/{found}{query}")
        for number in range(2):
            yield Exchange(f"responses-delete-{name}-{number}", "DELETE", f"{path}/{found}")
        yield Exchange(f"responses-post-{name}", "POST", f"{path}/{found}", b"{}")
    yield from _wrong("responses-wrong", path, base, [*SHARED, *RESPONSES])


def _messages() -> Iterator[Exchange]:
    path, base = "/v1/messages", {"messages": [ASKED], "system": LONG, "max_tokens": 5, "temperature": 0}
    tool = {"name": "weather", "description": "The weather", "input_schema": SCHEMA}
    used = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Rome"}}
    returned = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "sunny"}
    marked = {"type": "text", "text": LONG, "cache_control": {"type": "ephemeral"}}
    histories: list[Any] = [
        [ASKED, {"role": "assistant", "content": "At sea."}, ASKED],
        [{"role": "user", "content": [marked, {"type": "text", "text": "b"}]}],
        [ASKED, {"role": "assistant", "content": [used]}, {"role": "user", "content": [returned]}],
        [{"role": "user", "content": [{"type": "image", "source": {}}]}],
        [{"role": "user", "content": [{"type": "x"}]}],
        [{"role": "system", "content": "a"}],
        [{"role": "user"}],
        [{"role": "user", "content": ""}],
        ["a"],
    ]
    tools = {"tools": [tool], "max_tokens": 48}
    bodies = [{**base, **more} for more in SAMPLING] + [{**base, "messages": messages} for messages in histories]
    bodies += [
        {**base, "system": [marked]},
        {**base, "system": [{"type": "text", "text": "x-anthropic-billing-header: a=1"}]},
        {**base, **tools},
        {**base, **tools, "tool_choice": {"type": "any"}},
        {**base, **tools, "tool_choice": {"type": "tool", "name": "weather"}},
        {**base, **tools, "tool_choice": {"type": "none"}},
        {**base, "tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {**base, "stop_sequences": ["e"]},
        {**base, "max_tokens": 0},
        {**base, "max_tokens": 10**6},
        {**base, "thinking": {"type": "enabled", "budget_tokens": 1024}},
        {**base, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}, "max_tokens": 24},
        {**base, "metadata": {"user_id": "u"}},
        {**base, "diagnostics": {"previous_message_id": "{id:messages-0}"}},
        {**base, "context_management": {"edits": []}},
    ]
    yield from _posts("messages", path, bodies)
    yield from _wrong("messages-wrong", path, base, [*SHARED, *MESSAGES])
    counted = [{key: value for key, value in body.items() if key != "max_tokens"} for body in bodies]
    yield from _posts("count", f"{path}/count_tokens", counted, streams=False)
    yield from _wrong("count-wrong", f"{path}/count_tokens", {"messages": [ASKED]}, ["messages", "system", "tools"])


def _ollama() -> Iterator[Exchange]:
    options = {"temperature": 0, "num_predict": 5}
    path, base = "/api/chat", {"messages": [SYSTEM, ASKED], "options": options, "stream": False}
    call = {"function": {"name": "weather", "arguments": {"city": "Rome"}}}
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    tools = {"tools": [{"type": "function", "function": FUNCTION}]}
    more: list[Json] = [{}, tools, {"format": "json"}, {"format": SCHEMA}, {"think": True}, {"think": "low"}]
    more += [{"messages": [ASKED, called, {"role": "tool", "tool_name": "weather", "content": "sunny"}]}]
    more += [{"messages": [{"role": "user", "content": "a", "images": ["AA=="]}]}, {"keep_alive": -1}]
    for name in _words("num_predict top_k top_p min_p seed stop repeat_penalty num_ctx mirostat typical_p other"):
        more += [{"options": {**options, name: value}} for value in WRONG]
    yield from _posts("ollama", path, [{**base, **one} for one in more])
    yield from _wrong(
        "ollama-wrong", path, base, ["messages", "tools", "format", "think", "options", "stream", "model"]
    )
    prompts: list[Json] = [{}, {"system": "Be short."}, {"raw": True}, {"raw": True, "system": "a"}, {"format": "json"}]
    prompts += [{name: ["x"]} for name in _words("images context suffix template")]
    asked = {"prompt": "Where is the ship?", "options": options, "stream": False}
    yield from _posts("ollama-generate", "/api/generate", [{**asked, **one} for one in prompts])
    for path in _words("/api/tags /api/ps /api/version /api/show /api/embed /api/embeddings /api/pull /api/generate"):
        for method in ("GET", "POST", "DELETE", "HEAD"):
            yield Exchange(f"ollama {method} {path}", method, path, b"{}" if method == "POST" else b"")


def _other() -> Iterator[Exchange]:
    paths = _words(
        """/ /health /readyz /livez /version /metrics /openapi.json /docs /redoc /v1 /v1/models /v1/models/
    /v1/models/headstart-intent /v1/models/a/b /v1/models/other /tokenize /detokenize /reset_prefix_cache
    /v1/prefixes /v1/prefixes/none /v1/prefixes/a%2Fb /v1/cache/stats /v1/cache/explain /v1/cache/requests
    /v1/cache/requests?last=1 /v1/cache/requests?last=x /v1/cache/explain?request_id=
    /v1/cache/explain?request_id=none /v1/cache/explain?request_id={id:chat-0}
    /v1/cache/explain?request_id={id:responses-0} /v1/cache/explain?request_id={id:messages-0-stream} /v1/fleet
    /v1/embeddings /v1/chat/completions/ /v1/completions/ //v1/models /v1/responses/ /v1/unknown /api/chat/
    /V1/models /v1/models?x=1 /reset_prefix_cache?pinned=x /v1/%63ompletions"""
    )
    for path in paths:
        for method in ("GET", "POST", "DELETE", "PUT", "HEAD", "OPTIONS"):
            yield Exchange(f"{method} {path}", method, path, b"{}" if method == "POST" else b"")
    chat, prompt = {"messages": MANY}, {"prompt": LONG}
    for path, bodies in (
        (
            "/tokenize",
            [prompt, chat, {**prompt, "return_token_strs": True}, {}, {**chat, **prompt}, {"model": "x", **chat}],
        ),
        ("/detokenize", [{"tokens": [5, 6]}, {"tokens": []}, {"tokens": "x"}, {"tokens": [10**9]}, {}]),
        ("/v1/cache/explain", [prompt, chat, {"prompt": ["a", "b"]}, {}, {"messages": 5}, {"prompt": LONG, "n": 2}]),
        (
            "/v1/prefixes",
            [
                {"name": "p", "prompt": LONG},
                {"name": "q", "messages": MANY},
                {"name": "p"},
                {"prompt": "a"},
                {"name": 5},
            ],
        ),
    ):
        yield from _posts(f"other{path}", path, bodies, streams=False)
    yield Exchange("list prefixes", "GET", "/v1/prefixes")
    yield Exchange("remove prefix", "DELETE", "/v1/prefixes/p")
    yield Exchange("reset all", "POST", "/reset_prefix_cache?pinned=true")
    asked = json.dumps({"prompt": "The ship", "max_tokens": 3, "temperature": 0}).encode()
    for name, header in (
        ("origin", ("Origin", "https://example.com")),
        ("host", ("Host", "other.example")),
        ("id", ("x-request-id", "mine-1")),
        ("report", ("x-headstart-report", "1")),
        ("explain", ("x-headstart-explain", "1")),
        ("key", ("Authorization", "Bearer x")),
        ("type", ("Content-Type", "text/plain")),
        ("encoding", ("Content-Encoding", "gzip")),
    ):
        yield Exchange(f"header-{name}", "POST", "/v1/completions", asked, (header,))
