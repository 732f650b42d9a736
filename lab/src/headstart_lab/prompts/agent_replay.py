"""Prompt tokens computed for recorded agent chats with an injected mistake, with its rule off and on. JSON on stdout.

Prompts are rendered by a published chat template and tokenized by a real tokenizer, as by the server; the cache is
infinite, shares blocks of 16 tokens, and keeps what was generated.

python -m headstart_lab.prompts.agent_replay MODEL_FOLDER TEMPLATE TRACE... > replay.json
"""

import argparse
import copy
import hashlib
import json
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from headstart.openai.bounds import RequestBounds
from headstart.openai.chat.chat_template import ChatTemplate
from headstart.openai.request_bodies import parse_chat
from headstart.openai.tokenizer.segmented_tokenizer import SegmentedTokenizer
from headstart.openai.tokenizer.tokenizer import Tokenizer
from headstart.reuse.miss_ratios import miss_ratios
from headstart_lab.prompts.agent_chats import Body, agent, bodies_of, recorded_chats
from headstart_lab.prompts.prompt_mistakes import MISTAKES

BLOCK = 16
Mistake = Callable[[list[Body], Random], None]


def billing_header(bodies: list[Body], rng: Random) -> None:
    for body in bodies:
        version = f"2.1.{rng.randrange(200)}.{rng.getrandbits(12):03x}"
        line = f"x-anthropic-billing-header: cc_version={version}; cc_entrypoint=cli; cch={rng.getrandbits(20):05x};"
        body["messages"][0]["content"] = f"{line}\n{body['messages'][0]['content']}"


def trace_header(bodies: list[Body], rng: Random) -> None:
    for body in bodies:
        line = f"traceparent: 00-{rng.getrandbits(128):032x}-{rng.getrandbits(64):016x}-01"
        body["messages"][0]["content"] = f"{line}\n{body['messages'][0]['content']}"


def request_id(bodies: list[Body], rng: Random) -> None:
    for body in bodies:
        body["messages"][0]["content"] = f"Request ID: {rng.getrandbits(64):016x}\n{body['messages'][0]['content']}"


def tool_schemas(bodies: list[Body], rng: Random) -> None:
    for body in bodies:
        body["tools"] = [_reordered(tool, rng) for tool in body["tools"]]


def tool_results(bodies: list[Body], rng: Random) -> None:
    for body in bodies:
        for message in body["messages"]:
            if message["role"] == "tool":
                value = _reordered(json.loads(message["content"]), rng)
                message["content"] = json.dumps(value, indent=rng.choice([None, 1, 2]))


def _reordered(value: Any, rng: Random) -> Any:
    if isinstance(value, dict):
        keys = list(value)
        rng.shuffle(keys)
        return {key: _reordered(value[key], rng) for key in keys}
    return [_reordered(one, rng) for one in value] if isinstance(value, list) else value


def library(cause: str) -> Mistake:
    return lambda bodies, rng: MISTAKES[cause](rng)(bodies, rng)


def nothing(bodies: list[Body], rng: Random) -> None:
    pass


CASES: dict[str, tuple[Mistake, tuple[str, ...]]] = {
    "none": (nothing, ("tools", "schemas", "json", "billing_header", "trace_headers", "request_ids", "dates")),
    "billing header first": (billing_header, ("billing_header",)),
    "tracing header first": (trace_header, ("trace_headers",)),
    "request id first": (request_id, ("request_ids",)),
    "tools shuffled": (library("tool_order"), ("tools",)),
    "schemas serialized anew": (tool_schemas, ("schemas",)),
    "tool results serialized anew": (tool_results, ("json",)),
    "reasoning of older turns stripped": (library("reasoning_stripped"), ("drop_reasoning",)),
    "none, all reasoning sent back": (nothing, ("drop_reasoning",)),
    "timestamp first (reported only)": (library("timestamp"), ("dates",)),
}


class InfiniteCache:
    """Blocks of all tokens seen, by the hash of all tokens up to their end."""

    def __init__(self) -> None:
        self.blocks: set[bytes] = set()

    def use(self, prompt: "array[int]", whole: "array[int]") -> int:
        """Return the tokens of a prompt that are computed, and keep the blocks of prompt and output."""
        hit = 0
        for end, name in _names(prompt):
            if name not in self.blocks:
                break
            hit = end
        self.blocks.update(name for _, name in _names(prompt))
        self.blocks.update(name for _, name in _names(whole))
        return len(prompt) - min(hit, len(prompt) - 1)


def _names(tokens: "array[int]") -> list[tuple[int, bytes]]:
    hashed = hashlib.blake2b(digest_size=12)
    found: list[tuple[int, bytes]] = []
    for end in range(BLOCK, len(tokens) + 1, BLOCK):
        hashed.update(tokens[end - BLOCK : end].tobytes())
        found.append((end, hashed.digest()))
    return found


class Server:
    """Rendering and tokenizing as the server does, with some rules, and the cache."""

    def __init__(self, folder: Path, template: Path, rules: tuple[str, ...]) -> None:
        plain = Tokenizer.from_folder(folder)
        self._tokenizer = SegmentedTokenizer(plain).for_domain("", b"")
        self._template = ChatTemplate(template.read_text(encoding="utf-8"), {})
        self._bounds = RequestBounds(plain.vocab_size, 1 << 20, prompt_rules=frozenset(rules))
        self._plain = RequestBounds(plain.vocab_size, 1 << 20)
        self.cache = InfiniteCache()
        self.num_prompt = self.num_computed = 0
        self.chains: list[list[int]] = []

    def answer(self, body: Body, generated: Body | None) -> None:
        """Count one request whose generated turn is known from the next one, as it was generated."""
        chat = parse_chat(body, self._bounds)
        prompt = self._tokens(chat.messages, chat.params.tools, opens=True)
        whole = prompt
        if generated is not None:
            turn = parse_chat({**body, "messages": [generated]}, self._plain).messages
            whole = self._tokens([*chat.messages, *turn], chat.params.tools, opens=False)
        self.num_prompt += len(prompt)
        self.num_computed += self.cache.use(prompt, whole)
        self.chains.append([int.from_bytes(name[:8], "little") for _, name in _names(prompt)])

    def _tokens(self, messages: list[Body], tools: Any, *, opens: bool) -> "array[int]":
        shown = None if tools is None else tools.definitions
        text = self._template.render(messages, add_generation_prompt=opens, tools=shown)
        return self._tokenizer.encode(text, add_special_tokens=False)


def replay(folder: Path, template: Path, chats: list[list[Body]], mistake: Mistake, rules: tuple[str, ...]) -> Any:
    server = Server(folder, template, rules)
    for seed, chat in enumerate(chats):
        generated = [_generated(chat, index) for index in range(len(chat))]
        bodies = copy.deepcopy(chat)
        mistake(bodies, Random(f"mistake {seed}"))
        for body, turn in zip(bodies, generated, strict=True):
            server.answer(body, turn)
    ratios = {point.cache_tokens: point.miss_ratio for point in miss_ratios(server.chains, BLOCK)}
    return {
        "prompt_tokens": server.num_prompt,
        "computed_tokens": server.num_computed,
        "miss_ratio_by_lru_tokens": {size: round(ratio, 4) for size, ratio in ratios.items() if size >= 1 << 12},
    }


def _generated(chat: list[Body], index: int) -> Body | None:
    """Return the turn that was generated for a request: the next request has it behind the same messages."""
    if index + 1 >= len(chat):
        return None
    return chat[index + 1]["messages"][len(chat[index]["messages"])]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path, help="folder with the tokenizer")
    parser.add_argument("template", type=Path)
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--conversations", type=int, default=8, help="at most, of each trace")
    parser.add_argument("--max-calls", type=int, default=16, help="of each conversation")
    given = parser.parse_args()
    began = time.process_time()
    found: dict[str, Any] = {}
    for path in given.traces:
        rng = Random("agent")
        own = agent(rng)
        recorded = list(recorded_chats(path))[: given.conversations]
        chats = [bodies_of(chat[: given.max_calls], rng, own) for chat in recorded]
        rows: dict[str, Any] = {}
        for name, (mistake, rules) in CASES.items():
            off, on = (replay(given.model, given.template, chats, mistake, chosen) for chosen in ((), rules))
            rows[name] = {"rules": rules, "off": off, "on": on}
            print(path.stem, name, off["computed_tokens"], on["computed_tokens"], file=sys.stderr, flush=True)
        found[path.stem] = {"conversations": len(chats), "requests": sum(map(len, chats)), "cases": rows}
    tokenizer, template = given.model.name, given.template.stem
    print(json.dumps({"tokenizer": tokenizer, "template": template, "max_calls": given.max_calls, "traces": found}))
    print(f"{time.process_time() - began:.0f} s of CPU time", file=sys.stderr)


if __name__ == "__main__":
    main()
