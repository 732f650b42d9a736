"""Traces of real traffic as jobs: Mooncake's block ids, Azure's lengths, agents' texts; the format is detected.

The sharing in a trace is preserved: an id of 512 tokens becomes the same 512 tokens wherever it occurs, and texts with
a common beginning become tokens with one (four characters each; no tokenizer is needed, and lengths are approximate).
Pure: lines in, jobs out.
"""

import json
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import chain, pairwise
from math import isfinite
from random import Random
from typing import Any
from zlib import crc32

from headstart.core.errors import ConfigError
from headstart.workload.jobs import Job
from headstart.workload.synthetic import random_tokens

CHAIN_BLOCK = 512
"""Tokens per block id of Mooncake's traces."""
CHARS_PER_TOKEN = 4
MAX_TOKENS = 1 << 24  # of a prompt, and of an output
MAX_SECONDS = 366 * 86_400.0  # from the first request to the last: a simulation looks at its fleet all the time

KNOWN = "known are Mooncake's (hash_ids), agents' (input, output, session_id) and Azure's (TIMESTAMP,ContextTokens,...)"


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One request of a trace, in the trace's own units. Without `hash_ids` and `text` it shares nothing."""

    at: float  # seconds after the first one
    length: int  # tokens of the prompt
    output: int  # tokens
    hash_ids: tuple[int, ...] = ()  # one per 512 tokens; equal ids, equal prefix up to there
    text: str = ""
    session: str = ""  # session id, if the trace has one


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival."""

    kind: str  # "mooncake" | "agent" | "azure"
    requests: tuple[TracedRequest, ...]

    def first(self, count: int) -> "Trace":
        """Return the first `count` requests; 0: all."""
        return replace(self, requests=self.requests[: count or None])

    def up_to(self, longest: int) -> "Trace":
        """Return the requests with prompts of at most `longest` tokens; 0: all. Raises ConfigError if none is left."""
        kept = tuple(request for request in self.requests if not longest or request.length <= longest)
        if not kept:
            raise ConfigError(f"no prompt of the trace has {longest} tokens or less")
        return replace(self, requests=kept)

    def factor(self, max_prompt_tokens: int) -> float:
        """Return the factor that scales the longest prompt to at most so many tokens; 0: no limit."""
        longest = max(request.length for request in self.requests)
        return min(max_prompt_tokens / longest, 1.0) if max_prompt_tokens else 1.0

    def jobs(self, vocab_size: int, seed: int | str, *, factor: float = 1.0, speed: float = 1.0) -> list[Job]:
        """Return jobs with all lengths, outputs too, multiplied by `factor`, arriving `speed` times as fast.

        A seed is a set of prompts: other seeds have the same sharing among themselves, and share nothing with these.
        """
        blocks: dict[int, array[int]] = {}
        size = max(round(CHAIN_BLOCK * factor), 1)

        def block(name: int) -> "array[int]":
            if name not in blocks:
                blocks[name] = random_tokens(size, vocab_size, Random(f"{seed}/block/{name}"))
            return blocks[name]

        jobs: list[Job] = []
        for index, request in enumerate(self.requests):
            length = max(int(request.length * factor), 1)
            if request.hash_ids:
                prompt = array("i", chain.from_iterable(block(name) for name in request.hash_ids))[:length]
            elif request.text:
                prompt = _text_tokens(request.text, CHARS_PER_TOKEN / factor, vocab_size, str(seed))
            else:
                prompt = random_tokens(length, vocab_size, Random(f"{seed}/request/{index}"))
            jobs.append(Job(prompt, max(round(request.output * factor), 1), request.at / speed))
        return jobs


def read_trace(lines: Iterable[str]) -> Trace:
    """Return a trace from the lines of its file. Raises ConfigError with the number of an unreadable line."""
    numbered = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise ConfigError("the trace is empty")
    kind, parse, rows = _format(numbered)
    found: list[TracedRequest] = []
    for number, row in rows:
        try:
            found.append(parse(row))
            check_request(found[-1].at, found[-1].length, found[-1].output)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ConfigError(f"line {number} of the trace is no {kind} request: {error!r}"[:400]) from error
    if not found:
        raise ConfigError("the trace has no requests")
    found.sort(key=lambda request: request.at)
    start = found[0].at
    check_span(found[-1].at - start)
    return Trace(kind, tuple(replace(request, at=request.at - start) for request in found))


def check_request(at: float, num_tokens: int, num_output: int) -> None:
    """Raise ValueError unless a request has a time, and numbers of tokens that a simulation can hold."""
    if not isfinite(at):
        raise ValueError(f"its time is {at}")
    if not 1 <= num_tokens <= MAX_TOKENS:
        raise ValueError(f"it has a prompt of {num_tokens:.6g} tokens; between 1 and {MAX_TOKENS} are possible")
    if not 0 <= num_output <= MAX_TOKENS:
        raise ValueError(f"it has an output of {num_output:.6g} tokens; at most {MAX_TOKENS} are possible")


def check_span(seconds: float) -> None:
    """Raise ConfigError for a workload that lasts too long to be simulated."""
    if not seconds <= MAX_SECONDS:
        raise ConfigError(
            f"the requests arrive over {seconds:.4g} seconds and at most {MAX_SECONDS:.4g} can be simulated: use "
            "fewer, or raise --speed"
        )


Row = dict[str, Any]


def _format(numbered: Sequence[tuple[int, str]]) -> tuple[str, Callable[[Row], TracedRequest], list[tuple[int, Row]]]:
    """Return (name, parser of a row, rows with their line numbers)."""
    first = numbered[0][1]
    if not first.startswith("{"):
        head = first.lstrip("\ufeff").split(",")
        if not {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} <= set(head):
            raise ConfigError(f"line 1 begins with {first[:60]!r}: no trace in a known format; {KNOWN}")
        return (
            "azure",
            _azure,
            [(number, dict(zip(head, line.split(","), strict=False))) for number, line in numbered[1:]],
        )
    rows = [(number, _object(number, line)) for number, line in numbered]
    if {"hash_ids", "input_length"} <= rows[0][1].keys():
        return "mooncake", _mooncake, rows
    if {"input", "session_id"} <= rows[0][1].keys():
        return "agent", _agent, rows
    raise ConfigError(f"line 1 has the keys {sorted(rows[0][1])}: no trace in a known format; {KNOWN}")


def _object(number: int, line: str) -> Row:
    if not line.startswith("{"):
        raise ConfigError(f"line {number} of the trace is no JSON object")
    try:
        found: Row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"line {number} of the trace is no JSON: {error}") from error
    return found


def _mooncake(row: Row) -> TracedRequest:
    names, length = row["hash_ids"], int(row["input_length"])
    if len(names) * CHAIN_BLOCK < length:
        raise ValueError(f"{len(names)} blocks of {CHAIN_BLOCK} for {length} tokens")
    ids = tuple(int(name) for name in names[: -(-length // CHAIN_BLOCK)])
    return TracedRequest(float(row["timestamp"]) / 1e3, length, int(row["output_length"]), hash_ids=ids)


def _agent(row: Row) -> TracedRequest:
    text, output = str(row["input"]), str(row.get("output") or "")
    session = str(row["session_id"])
    return TracedRequest(
        float(row["timestamp"]) / 1e6, _tokens_of(text), _tokens_of(output), text=text, session=session
    )


def _azure(row: Row) -> TracedRequest:
    at = datetime.fromisoformat(row["TIMESTAMP"]).timestamp()
    return TracedRequest(at, int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def _tokens_of(text: str) -> int:
    return -(-len(text) // CHARS_PER_TOKEN)


def _text_tokens(text: str, chars: float, vocab_size: int, seed: str) -> "array[int]":
    """Return a token for every `chars` characters, from their content: a common beginning gives equal tokens."""
    salt = crc32(seed.encode())
    cuts = [round(i * chars) for i in range(int(len(text) / chars) + 2)]
    pieces = (text[start:end] for start, end in pairwise(cuts))
    return array("i", (crc32(piece.encode("utf-8", "replace"), salt) % vocab_size for piece in pieces if piece))
