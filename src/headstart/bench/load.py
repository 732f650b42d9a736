"""A streaming client against any OpenAI endpoint: open loop (Poisson arrivals) or closed loop (so many at a time).

Latencies count from the moment a request was due. Prompts are token ids, so that lengths are exact; cached tokens are
what the server itself reports in `usage.prompt_tokens_details`.
"""

import asyncio
import json
import time
from array import array
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from headstart.bench.progress import QUIET, Bar
from headstart.bench.report import Report, Sheet
from headstart.core.errors import ConfigError
from headstart.workload.record import Percentiles, RequestRecord, Summary, summarize
from headstart.workload.synthetic import Shape, poisson_arrivals, shared_prefix


@dataclass(frozen=True, slots=True)
class Target:
    """The server to measure."""

    url: str  # with or without /v1
    model: str = ""  # empty: the first one it lists
    api_key: str = ""
    timeout: float = 300.0  # seconds a request may take

    @property
    def base(self) -> str:
        return self.url.rstrip("/").removesuffix("/v1") + "/v1"

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """The workload: groups of prompts with a shared prefix, in random order."""

    groups: int
    prompts: int  # per group
    shape: Shape
    vocab_size: int
    rate: float = 0.0  # requests per second, Poisson; 0: closed loop
    concurrency: int = 8  # of the closed loop
    seed: int = 0


def run_load(target: Target, config: LoadConfig, bar: Bar = QUIET) -> Report:
    """Sends the whole workload once. Raises ConfigError if the server cannot be reached or lists no model."""
    if urlsplit(target.url).scheme not in ("http", "https"):
        raise ConfigError(f"--against {target.url!r} is not an http:// or https:// URL")
    model, records = asyncio.run(_send_all(target, config, bar))
    return _report(target, config, model, records)


async def _send_all(target: Target, config: LoadConfig, bar: Bar) -> tuple[str, list[RequestRecord]]:
    """(model name, one record per prompt)."""
    rng = Random(config.seed)
    prompts = shared_prefix(config.groups, config.prompts, config.shape, config.vocab_size, rng)
    rng.shuffle(prompts)
    timeout = aiohttp.ClientTimeout(total=target.timeout)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(headers=target.headers, timeout=timeout, connector=connector) as session:
        client = _Client(session, target, config.shape.output, target.model or await _first_model(session, target), bar)
        bar.stage(f"{len(prompts)} requests", len(prompts))
        start = time.perf_counter()
        if config.rate:
            due = poisson_arrivals(config.rate, len(prompts), rng)
            sends = [client.send_at(i, p, start + at) for i, (p, at) in enumerate(zip(prompts, due, strict=True))]
        else:
            slots = asyncio.Semaphore(config.concurrency)
            sends = [client.send_in(slots, i, prompt) for i, prompt in enumerate(prompts)]
        return client.model, await asyncio.gather(*sends)


async def _first_model(session: aiohttp.ClientSession, target: Target) -> str:
    try:
        async with session.get(f"{target.base}/models") as response:
            if response.status != 200:
                text = (await response.text())[:300]
                raise ConfigError(f"{target.base}/models answered with HTTP {response.status}: {text}")
            body = await response.json(content_type=None)
            return str(body["data"][0]["id"])
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise ConfigError(f"cannot reach {target.base}/models: {error or type(error).__name__}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{target.base}/models lists no model; name one with --model") from error


class RequestFailedError(Exception):
    """A request that did not end as it should; the text says how."""


def read_event(line: bytes) -> dict[str, Any] | None:
    """The JSON of one line of a stream: None for `[DONE]`, nothing in it for a line without data.

    Raises RequestFailedError for an error in mid stream and ValueError for what is no JSON.
    """
    if not line.startswith(b"data:"):
        return {}
    data = line.removeprefix(b"data:").strip()
    if data == b"[DONE]":
        return None
    event: dict[str, Any] = json.loads(data)
    if "error" in event:
        raise RequestFailedError(f"error in mid stream: {event['error']}")
    return event


@dataclass(slots=True)
class _Client:
    """Sends prompts to one model and notes what comes back."""

    session: aiohttp.ClientSession
    target: Target
    output_tokens: int
    model: str
    bar: Bar

    async def send_at(self, index: int, prompt: "array[int]", due: float) -> RequestRecord:
        await asyncio.sleep(max(due - time.perf_counter(), 0.0))
        return await self._send(index, prompt, due)

    async def send_in(self, slots: asyncio.Semaphore, index: int, prompt: "array[int]") -> RequestRecord:
        async with slots:
            return await self._send(index, prompt, time.perf_counter())

    async def _send(self, index: int, prompt: "array[int]", arrival: float) -> RequestRecord:
        """One request to its end; a failure becomes the record's error."""
        times: list[float] = []
        usage: dict[str, Any] = {}
        error: str | None = None
        try:
            async for event in self._events(prompt):
                if event.get("usage"):
                    usage = event["usage"]
                if any(choice.get("text") or choice.get("finish_reason") for choice in event.get("choices", ())):
                    times.append(time.perf_counter())
            self._check(usage, len(prompt), times)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, RequestFailedError) as failure:
            error = str(failure) or type(failure).__name__
        self.bar.advance()
        return RequestRecord(
            f"load-{index}",
            arrival,
            times[0] if times else None,
            times[-1] if times and error is None else None,
            len(prompt),
            (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
            usage.get("completion_tokens") or 0,
            max((b - a for a, b in pairwise(times)), default=0.0),
            error,
        )

    async def _events(self, prompt: "array[int]") -> AsyncIterator[dict[str, Any]]:
        """The JSON events of one streamed completion, up to `[DONE]`. Raises RequestFailedError if it is torn."""
        body = {
            "model": self.model,
            "prompt": prompt.tolist(),
            "max_tokens": self.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        async with self.session.post(f"{self.target.base}/completions", json=body) as response:
            if response.status != 200:
                raise RequestFailedError(f"HTTP {response.status}: {(await response.text())[:300]}")
            async for line in response.content:
                event = read_event(line)
                if event is None:
                    return
                yield event
        raise RequestFailedError("the stream ended without [DONE]")

    def _check(self, usage: dict[str, Any], prompt_tokens: int, times: list[float]) -> None:
        """Raises RequestFailedError if the server's own count of tokens is not what was asked."""
        counted = (usage.get("prompt_tokens"), usage.get("completion_tokens"))
        if counted != (prompt_tokens, self.output_tokens):
            raise RequestFailedError(
                f"usage says {counted} tokens in and out, sent were {(prompt_tokens, self.output_tokens)}"
            )
        if not times:
            raise RequestFailedError("the stream had no choices")


def _report(target: Target, config: LoadConfig, model: str, records: list[RequestRecord]) -> Report:
    summary = summarize(records)
    values: dict[str, Any] = {
        "requests": summary.requests,
        "errors": summary.errors,
        "seconds": summary.seconds,
        "request_rate": (summary.requests - summary.errors) / summary.seconds if summary.seconds else None,
        "output_tokens_per_s": summary.output_rate,
        "prompt_tokens": summary.prompt_tokens,
        "cached_tokens": summary.cached_tokens,
        "cached_share": summary.cached_share,
        **{f"{name}_ms": _in_ms(found) for name, found in _distributions(summary).items()},
    }
    errors = [record.error for record in records if record.error is not None]
    return Report(
        "load",
        values,
        model=model,
        seed=config.seed,
        runs=1,
        setup={
            "against": target.base,
            "loop": f"open, {config.rate} requests/s" if config.rate else f"closed, {config.concurrency} at a time",
            "groups": config.groups,
            "prompts_per_group": config.prompts,
            "shared_tokens": config.shape.shared,
            "own_tokens": config.shape.own,
            "output_tokens": config.shape.output,
        },
        sheets=[_sheet(summary, values)],
        problems=[f"{len(errors)} of {len(records)} requests failed, the first with: {errors[0]}"] if errors else [],
    )


def _distributions(summary: Summary) -> dict[str, Percentiles | None]:
    return {"ttft": summary.ttft, "tpot": summary.tpot, "e2e": summary.e2e, "longest_gap": summary.longest_gap}


def _in_ms(found: Percentiles | None) -> dict[str, float] | None:
    return None if found is None else {name: 1e3 * value for name, value in found._asdict().items()}


def _sheet(summary: Summary, values: dict[str, Any]) -> Sheet:
    title = (
        f"{summary.requests} requests, {summary.errors} errors, {summary.seconds:.1f} s, "
        f"{100 * summary.cached_share:.1f} % of prompt tokens cached"
    )
    rows = tuple((name, *(values[f"{name}_ms"] or {}).values()) for name in _distributions(summary))
    return Sheet(title, ("ms", *Percentiles._fields), rows)
