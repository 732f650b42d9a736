"""Requests that vLLM accepts, drawn at random from its documented ranges, to check which of them a server answers.

    legal_requests.py draw --count 1300 --seed 1 > drawn.jsonl
    legal_requests.py ask http://127.0.0.1:8001 < drawn.jsonl > statuses.jsonl      # vLLM, or any OpenAI server
    legal_requests.py accepted drawn.jsonl statuses.jsonl > accepted.jsonl          # those that were answered 200

A bound of Headstart that is tighter than vLLM's shows as a status other than 200. Every parameter of vLLM's completion
and chat requests is drawn except those in LEFT_OUT. Standard library only, so that it runs in a peer's environment.
"""

import argparse
import json
import random
import sys
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

LEFT_OUT = {
    "not built here": "tools, response_format, structured_outputs, use_beam_search, allowed_token_ids, bad_words, "
    "truncate_prompt_tokens, logprob_token_ids, prompt_embeds, documents, suffix",
    "switches of vLLM's deployment": "kv_transfer_params, ec_transfer_params, mm_*, media_io_kwargs, vllm_xargs, "
    "routed_experts_prompt_start, watermarking, chat_template (needs --trust-request-chat-template)",
}
VOCABULARY, CONTEXT = 1536, 2048  # of the bundled model
WORDS = (
    *("set", "an", "alarm", "for", "seven", "tomorrow", "morning", "what", "is", "the", "weather", "in", "the"),
    *("hills", "play", "some", "jazz", "turn", "the", "lights", "off", "remind", "me", "to", "call", "grandma"),
    *("übermorgen", "früh", "明天", "早上", "七点", "напомни", "мне", "позвонить", "\n\t", "🙂", "{}", "<|im_end|>"),
    *("&amp;", "42", "3.14", "-7"),
)

Json = dict[str, Any]


def text(rng: random.Random, longest: int) -> str:
    """Return one to `longest` words."""
    return " ".join(rng.choices(WORDS, k=rng.randint(1, longest)))


def token_ids(rng: random.Random, longest: int) -> list[int]:
    """Return one to `longest` token ids of the vocabulary."""
    return [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, longest))]


def number(rng: random.Random, low: float, high: float) -> float | int:
    """Return a number in [low, high]; in one case of five it is one of the bounds."""
    return rng.choice((low, high)) if rng.random() < 0.2 else round(rng.uniform(low, high), rng.randint(0, 6))


def positive(rng: random.Random, high: float) -> float:
    """Return a number in (0, high], over six orders of magnitude."""
    return rng.choice((high, high / 2, high * 10 ** rng.uniform(-6, 0), rng.uniform(high / 1e6, high)))


def draw_sampling(rng: random.Random) -> Json:
    """Draw the common parameters of completions and chats; each one is in about a quarter of all requests."""
    max_tokens = rng.choice((1, 1, rng.randint(1, 8), rng.randint(1, 32), rng.randint(1, 128)))
    choices: dict[str, Any] = {
        "temperature": lambda: number(rng, 0, 2),
        "top_p": lambda: positive(rng, 1.0),
        "top_k": lambda: rng.choice((-1, 0, 1, rng.randint(1, VOCABULARY), rng.randint(1, 2**31 - 1))),
        "min_p": lambda: number(rng, 0, 1),
        "presence_penalty": lambda: number(rng, -2, 2),
        "frequency_penalty": lambda: number(rng, -2, 2),
        "repetition_penalty": lambda: rng.choice((positive(rng, 2.0), 10 ** rng.uniform(-30, 30))),
        "seed": lambda: rng.choice((0, -1, 2**63 - 1, -(2**63), rng.randint(-(2**63), 2**63 - 1))),
        "n": lambda: round(2 ** rng.uniform(0, 7)),
        "min_tokens": lambda: rng.randint(0, max_tokens),
        "stop": lambda: rng.choice((text(rng, 2), [text(rng, 9) for _ in range(rng.randint(0, 16))], None, [])),
        "stop_token_ids": lambda: rng.choice((token_ids(rng, 8), token_ids(rng, 100), [], None)),
        "logit_bias": lambda: {str(i): number(rng, -100, 100) for i in token_ids(rng, rng.choice((3, 300)))},
        "ignore_eos": lambda: rng.random() < 0.5,
        "include_stop_str_in_output": lambda: rng.random() < 0.5,
        "skip_special_tokens": lambda: rng.random() < 0.5,
        "spaces_between_special_tokens": lambda: rng.random() < 0.5,
        "length_penalty": lambda: number(rng, 0, 2),
        "priority": lambda: 0,
        "user": lambda: text(rng, 3),
        "request_id": lambda: f"{rng.getrandbits(64):x}",
        "session_id": lambda: f"{rng.getrandbits(64):x}",
        "cache_salt": lambda: rng.choice(
            (f"{rng.getrandbits(256):x}", text(rng, 4).replace("/", "-")[:128], "user:42", "tenant one.two|three")
        ),
        "return_token_ids": lambda: rng.random() < 0.5,
        "return_tokens_as_token_ids": lambda: rng.random() < 0.5,
        "add_special_tokens": lambda: rng.random() < 0.5,
        "include_reasoning": lambda: True,
        "repetition_detection": lambda: {"max_pattern_size": 0},
        "stream_interval": lambda: rng.randint(1, 9),
        "prompt_logprobs": lambda: rng.randint(0, 20),
    }
    body = {name: make() for name, make in choices.items() if rng.random() < 0.25}
    if rng.random() < 0.9:
        body["max_tokens"] = max_tokens
    if rng.random() < 0.4:
        body.pop("prompt_logprobs", None)  # not supported with a stream
        body["stream"] = True
        if rng.random() < 0.5:
            body["stream_options"] = {"include_usage": rng.random() < 0.7, "continuous_usage_stats": rng.random() < 0.3}
    return body


def draw_completion(rng: random.Random) -> Json:
    """Draw a body of /v1/completions."""
    prompts = (
        lambda: text(rng, 200),
        lambda: [text(rng, 50) for _ in range(rng.randint(1, 8))],
        lambda: token_ids(rng, 400),
        lambda: [token_ids(rng, 100) for _ in range(rng.randint(1, 8))],
    )
    body = {"prompt": rng.choice(prompts)(), **draw_sampling(rng)}
    if rng.random() < 0.25:
        body["logprobs"] = rng.randint(0, 20)
    if rng.random() < 0.25:
        body["echo"] = rng.random() < 0.7
    return body


def draw_message(rng: random.Random, role: str) -> Json:
    """Draw one message of a role."""
    content: Any = text(rng, 60)
    if rng.random() < 0.3:
        content = [{"type": "text", "text": text(rng, 30)} for _ in range(rng.randint(1, 3))]
    message: Json = {"role": role, "content": content}
    if rng.random() < 0.1:
        message["name"] = "someone"
    return message


def draw_chat(rng: random.Random) -> Json:
    """Draw a body of /v1/chat/completions: mostly plain conversations, some with tool calls."""
    messages = [draw_message(rng, rng.choice(("system", "developer")))] if rng.random() < 0.5 else []
    for _ in range(rng.randint(0, 4)):
        messages += [draw_message(rng, "user"), draw_message(rng, "assistant")]
        if rng.random() < 0.2:
            call = {"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": '{"of": "rain"}'}}
            messages[-1] = {"role": "assistant", "content": rng.choice((None, "")), "tool_calls": [call]}
            messages.append({"role": "tool", "tool_call_id": "call_1", "content": text(rng, 20)})
    messages.append(draw_message(rng, "user"))
    body = {"messages": messages, **draw_sampling(rng)}
    if rng.random() < 0.3 and "max_tokens" in body:
        body["max_completion_tokens"] = body["max_tokens"]
    if rng.random() < 0.25:
        body["logprobs"] = rng.random() < 0.8
        if body["logprobs"]:
            body["top_logprobs"] = rng.randint(0, 20)
    extras: Json = {
        "tool_choice": "none",
        "parallel_tool_calls": True,
        "reasoning_effort": rng.choice(("none", "low", "high")),
        "chat_template_kwargs": {"enable_thinking": rng.random() < 0.5},
        "metadata": {"trace": "1"},
        "store": False,
        "service_tier": "auto",
    }
    return body | {name: value for name, value in extras.items() if rng.random() < 0.1}


def draw(count: int, seed: int) -> list[Json]:
    """Return `count` requests: {"path", "body"}; the same for the same seed."""
    rng = random.Random(seed)
    return [
        {"path": "/v1/completions", "body": draw_completion(rng)}
        if rng.random() < 0.5
        else {"path": "/v1/chat/completions", "body": draw_chat(rng)}
        for _ in range(count)
    ]


def ask(url: str, request: Json, without: frozenset[str] = frozenset(), timeout: float = 300.0) -> Json:
    """Send one request and return {"status", "error"}; a stream counts as answered if it ends with [DONE]."""
    data = json.dumps({name: value for name, value in request["body"].items() if name not in without}).encode()
    post = urllib.request.Request(url + request["path"], data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(post, timeout=timeout) as response:
            body, status = response.read(), response.status
    except urllib.error.HTTPError as error:
        return {"status": error.code, "error": error.read().decode(errors="replace")[:500]}
    except OSError as error:
        return {"status": 0, "error": repr(error)}
    if request["body"].get("stream"):
        failed = b"data: [DONE]" not in body or b'"error"' in body
        return {"status": 500 if failed else status, "error": body[-500:].decode(errors="replace") if failed else ""}
    json.loads(body, parse_constant=_no_constant)
    return {"status": status, "error": ""}


def _no_constant(name: str) -> float:
    raise ValueError(f"the answer holds {name}, which is no JSON")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    drawing = verbs.add_parser("draw")
    drawing.add_argument("--count", type=int, default=1300)
    drawing.add_argument("--seed", type=int, default=1)
    asking = verbs.add_parser("ask")
    asking.add_argument("url")
    asking.add_argument("--at-once", type=int, default=16)
    asking.add_argument("--without", action="append", default=[], help="parameter to leave out of every body")
    accepting = verbs.add_parser("accepted")
    accepting.add_argument("drawn")
    accepting.add_argument("statuses")
    options = parser.parse_args()
    if options.verb == "draw":
        lines: list[Json] = draw(options.count, options.seed)
    elif options.verb == "ask":
        requests = [json.loads(line) for line in sys.stdin]
        with ThreadPoolExecutor(options.at_once) as pool:
            lines = list(pool.map(lambda request: ask(options.url, request, frozenset(options.without)), requests))
        print(Counter(line["status"] for line in lines), file=sys.stderr)
        reasons = Counter(line["error"][:160] for line in lines if line["status"] != 200)
        for reason, times in reasons.most_common(40):
            print(f"{times:5} {reason}", file=sys.stderr)
    else:
        with open(options.drawn) as drawn, open(options.statuses) as statuses:
            pairs = zip(map(json.loads, drawn), map(json.loads, statuses), strict=True)
            lines = [request for request, answer in pairs if answer["status"] == 200]
    for line in lines:
        print(json.dumps(line, ensure_ascii=False))


if __name__ == "__main__":
    main()
