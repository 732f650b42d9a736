"""Traces of real traffic as jobs: block ids, lengths, texts; the format is detected, and the units of its numbers.

The sharing in a trace is preserved: an id of 512 tokens becomes the same 512 tokens wherever it occurs, and texts with
a common beginning become tokens with one (four characters each; no tokenizer is needed, and lengths are approximate).
Pure: lines in, jobs out. Files: recorded/trace_files.py.
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
from headstart.workload.recorded.trace_units import DOCUMENTED, RECOGNISED, TraceUnits, seconds_per_unit, tokens_per_id
from headstart.workload.synthetic import random_tokens

CHAIN_BLOCK = 512
"""Tokens per block id of Mooncake's own traces, and of synthetic ones."""
CHARS_PER_TOKEN = 4
MAX_TOKENS = 1 << 24  # of a prompt, and of an output
MAX_SECONDS = 366 * 86_400.0  # from the first request to the last: a simulation looks at its fleet all the time

KNOWN = (
    "known are Mooncake's and Bailian's (hash_ids), agents' (input, output, session_id), sessions of coding agents "
    "(requests, block_size) and Azure's (TIMESTAMP,ContextTokens,...)"
)


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One request of a trace, in the trace's own units. Without `hash_ids` and `text` it shares nothing."""

    at: float  # seconds after the first one
    length: int  # tokens of the prompt
    output: int  # tokens
    hash_ids: Sequence[int] = ()  # one per block, also for the last tokens; equal ids, equal prefix up to there
    text: str = ""
    session: str = ""  # session id, if the trace has one; a sub-agent's is "SESSION/AGENT"
    parent: str = ""  # of a sub-agent: the session that it belongs to
    number: int = 0  # of the request in its trace, if others come `after` it
    after: tuple[int, ...] = ()  # numbers of the requests whose answers it needs
    pause: float = 0.0  # seconds after the last of these: think time, or that of a tool

    @property
    def root_session(self) -> str:
        """The session that the request belongs to, also if a sub-agent sends it."""
        return self.parent or self.session


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival. `block_size`: tokens per id."""

    kind: str  # "mooncake" | "bailian" | "agent" | "sessions" | "azure"
    requests: tuple[TracedRequest, ...]
    block_size: int = CHAIN_BLOCK
    num_dropped: int = 0  # requests left out because a prompt was too long

    def first(self, count: int) -> "Trace":
        """Return the first `count` requests; 0: all."""
        return replace(self, requests=self.requests[: count or None])

    def up_to_length(self, longest: int) -> "Trace":
        """Return the requests with prompts of at most `longest` tokens; 0: all. Raises ConfigError if none is left.

        Of the sessions of coding agents, those with a longer prompt are left out as a whole.
        """
        if not longest:
            return self
        long = {request.root_session for request in self.requests if request.length > longest}
        is_whole = self.kind == "sessions"
        kept = tuple(
            request
            for request in self.requests
            if (request.root_session not in long if is_whole else request.length <= longest)
        )
        if not kept:
            raise ConfigError(f"no prompt of the trace has {longest} tokens or less")
        return replace(self, requests=kept, num_dropped=len(self.requests) - len(kept))

    def with_divided_lengths(self, divisor: int) -> "Trace":
        """Return the trace with all lengths divided, outputs too, and rounded up. Raises ConfigError.

        Blocks have fewer tokens, so what is shared is divided alike: the block size must be divisible.
        """
        if divisor == 1:
            return self
        if not all(request.hash_ids for request in self.requests):
            raise ConfigError(f"lengths of a trace of the kind {self.kind!r} cannot be divided: it has no block ids")
        if self.block_size % divisor:
            raise ConfigError(f"ids stand for {self.block_size} tokens, which {divisor} does not divide")
        kept = [
            replace(one, length=-(-one.length // divisor), output=-(-one.output // divisor)) for one in self.requests
        ]
        return replace(self, requests=tuple(kept), block_size=self.block_size // divisor)

    def fitting_length_factor(self, max_prompt_tokens: int) -> float:
        """Return the factor that scales the longest prompt to at most so many tokens; 0: no limit."""
        longest = max(request.length for request in self.requests)
        return min(max_prompt_tokens / longest, 1.0) if max_prompt_tokens else 1.0

    def to_jobs(self, vocab_size: int, seed: int | str, *, factor: float = 1.0, speed: float = 1.0) -> list[Job]:
        """Return jobs with all lengths, outputs too, multiplied by `factor`, arriving `speed` times as fast.

        Jobs that come after others are due a pause after these, which is shortened alike.

        A seed is a set of prompts: other seeds have the same sharing among themselves, and share nothing with these.
        """
        blocks: dict[tuple[int, int], array[int]] = {}
        size = self.block_size * factor

        def block(name: int, index: int) -> "array[int]":
            num_tokens = round((index + 1) * size) - round(index * size)
            if (name, num_tokens) not in blocks:
                blocks[name, num_tokens] = random_tokens(num_tokens, vocab_size, Random(f"{seed}/block/{name}"))
            return blocks[name, num_tokens]

        jobs: list[Job] = []
        indices = {request.number: index for index, request in enumerate(self.requests)}
        for index, request in enumerate(self.requests):
            length = max(int(request.length * factor), 1)
            if request.hash_ids:
                parts = (block(name, place) for place, name in enumerate(request.hash_ids))
                prompt = array("i", chain.from_iterable(parts))[:length] or random_tokens(1, vocab_size, Random(seed))
            elif request.text:
                prompt = _text_tokens(request.text, CHARS_PER_TOKEN / factor, vocab_size, str(seed))
            else:
                prompt = random_tokens(length, vocab_size, Random(f"{seed}/request/{index}"))
            output = max(round(request.output * factor), 1)
            after = tuple(indices[number] for number in request.after if number in indices)
            jobs.append(Job(prompt, output, request.at / speed, after=after, pause=request.pause / speed))
        return jobs


def parse_trace(lines: Iterable[str], units: TraceUnits = RECOGNISED) -> Trace:
    """Return a trace from the lines of its file. Raises ConfigError with the number of an unreadable line.

    Units that are not given are recognised. Raises ConfigError if several are possible.
    """
    numbered = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise ConfigError("the trace is empty")
    kind, parse, rows = _format(numbered)
    found: list[TracedRequest] = []
    for number, row in rows:
        try:
            found.append(parse(row))
            check_traced_request(found[-1].at, found[-1].length, found[-1].output)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ConfigError(f"line {number} of the trace is no {kind} request: {error!r}"[:400]) from error
    if not found:
        raise ConfigError("the trace has no requests")
    size = CHAIN_BLOCK
    if kind in ("mooncake", "bailian"):
        size = tokens_per_id([(len(request.hash_ids), request.length) for request in found], units.block_size)
        found = [replace(one, hash_ids=_covering(one, size, index)) for index, one in enumerate(found)]
    scale = 1.0 if kind == "azure" else seconds_per_unit([one.at for one in found], DOCUMENTED.get(kind), units)
    found.sort(key=lambda request: request.at)
    start = found[0].at
    check_workload_duration(scale * (found[-1].at - start))
    return Trace(kind, tuple(replace(request, at=scale * (request.at - start)) for request in found), size)


def check_traced_request(at: float, num_tokens: int, num_output: int) -> None:
    """Raise ValueError unless a request has a time, and numbers of tokens that a simulation can hold."""
    if not isfinite(at):
        raise ValueError(f"its time is {at}")
    if not 1 <= num_tokens <= MAX_TOKENS:
        raise ValueError(f"it has a prompt of {num_tokens:.6g} tokens; between 1 and {MAX_TOKENS} are possible")
    if not 0 <= num_output <= MAX_TOKENS:
        raise ValueError(f"it has an output of {num_output:.6g} tokens; at most {MAX_TOKENS} are possible")


def check_workload_duration(seconds: float) -> None:
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
        return ("bailian" if "parent_chat_id" in rows[0][1] else "mooncake"), _hashed, rows
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


def _hashed(row: Row) -> TracedRequest:
    names, length = row["hash_ids"], int(row["input_length"])
    session = str(row.get("session_id") or "")
    ids = tuple(int(name) for name in names)
    return TracedRequest(float(row["timestamp"]), length, int(row["output_length"]), hash_ids=ids, session=session)


def _covering(request: TracedRequest, size: int, index: int) -> Sequence[int]:
    """Return an id per block of a prompt: surplus ones are cut, and tokens behind the last full block get one."""
    num_blocks, ids = -(-request.length // size), request.hash_ids
    return ids[:num_blocks] if len(ids) >= num_blocks else (*ids, -1 - index)


def _agent(row: Row) -> TracedRequest:
    text, output = str(row["input"]), str(row.get("output") or "")
    session = str(row["session_id"])
    return TracedRequest(float(row["timestamp"]), _tokens_of(text), _tokens_of(output), text=text, session=session)


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
