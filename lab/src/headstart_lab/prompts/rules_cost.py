"""CPU time of the rules for prompts, per request: preparing a chat on the server, and reading its body at the router.

Warm requests of recorded agent chats, without and with all rules in turn (A B A B). JSON on stdout.

python -m headstart_lab.prompts.rules_cost MODEL_FOLDER TRACE > rules_cost.json
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from headstart.gateway.proxy.request_reader import RequestParser, SenderRoutingInfo
from headstart.openai.bounds import RequestBounds
from headstart.openai.canonical.canonical_body import CHAT
from headstart.openai.canonical.prompt_rules import NO_RULES, RULE_TEXTS, PromptRules
from headstart.openai.engine_requests import encode_chat
from headstart.openai.request_bodies import parse_chat
from headstart.openai.request_json import parse_json_object
from headstart.openai.tokenizer.segmented_tokenizer import SegmentedTokenizer
from headstart.openai.tokenizer.tokenizer import Tokenizer
from headstart_lab.prompts.agent_chats import agent, bodies_of, recorded_chats
from headstart_lab.prompts.agent_replay import billing_header, tool_schemas

ALL: PromptRules = frozenset(RULE_TEXTS) - {"keep_reasoning"}


def cpu_ms(work: Callable[[bytes], object], bodies: list[bytes]) -> float:
    """Return the CPU milliseconds of one pass, per body."""
    began = time.process_time()
    for body in bodies:
        work(body)
    return (time.process_time() - began) * 1e3 / len(bodies)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--conversations", type=int, default=4)
    parser.add_argument("--max-calls", type=int, default=8)
    parser.add_argument("--passes", type=int, default=15)
    given = parser.parse_args()
    rng = Random("agent")
    own = agent(rng)
    found: dict[str, Any] = {}
    tokenizer = Tokenizer.from_folder(given.model)
    segmented = SegmentedTokenizer(tokenizer).for_domain("", b"")
    for name in ("clean", "mistaken"):
        bodies: list[bytes] = []
        for chat in list(recorded_chats(given.trace))[: given.conversations]:
            sent = bodies_of(chat[: given.max_calls], rng, own)
            if name == "mistaken":
                billing_header(sent, rng)
                tool_schemas(sent, rng)
            bodies += [json.dumps(body).encode() for body in sent]

        def server(rules: PromptRules) -> Callable[[bytes], object]:
            bounds = RequestBounds(tokenizer.vocab_size, 1 << 20, tool_call_parser="hermes", prompt_rules=rules)
            return lambda data: encode_chat(parse_chat(parse_json_object(data), bounds), segmented, bounds)

        def parsed(rules: PromptRules) -> Callable[[bytes], object]:
            bounds = RequestBounds(tokenizer.vocab_size, 1 << 20, prompt_rules=rules)
            return lambda data: parse_chat(parse_json_object(data), bounds)

        def router(rules: PromptRules) -> Callable[[bytes], object]:
            reader = RequestParser(None, rules)
            return lambda data: reader.read(CHAT, data, SenderRoutingInfo())

        for part, make in (("server_parses", parsed), ("server_prepares", server), ("router_reads", router)):
            works = [make(rules) for rules in (NO_RULES, ALL)]
            for work in works:
                cpu_ms(work, bodies)
            passes = [[cpu_ms(work, bodies) for work in works] for _ in range(given.passes)]
            found.setdefault(name, {"requests": len(bodies), "mean_bytes": sum(map(len, bodies)) // len(bodies)})
            found[name][part] = {
                "off_ms": round(median(off for off, _ in passes), 4),
                "on_ms": round(median(on for _, on in passes), 4),
                "added_ms": round(median(on - off for off, on in passes), 4),
            }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
