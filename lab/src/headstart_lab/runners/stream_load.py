"""A client that keeps streams open and times every token, as a separate process, as cheap as Python allows.

Made for fake replicas with `--stamps`: each token carries the time of its write, the first one also the arrival time
of its request. So the latency between client and replica is known for every token, independent of the replica's own
time. Processes on one machine share a clock (`time.monotonic`).

`python -m headstart_lab.runners.stream_load PLAN` (JSON of `StepPlan`) prints one JSON line when measuring begins, one
when it ends, and one with the findings.
"""

import asyncio
import json
import re
import sys
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import uvloop

from headstart.workload.request_record import percentile

_STAMPS = re.compile(rb'" (\d+\.\d{6})(?: (\d+\.\d{6}))?"')
_DONE = b"data: [DONE]"
_PAUSE = 0.05  # seconds before a failed connection is made again
_MAX_ERRORS = 1000  # then the client stops


@dataclass(frozen=True, slots=True)
class Plan:
    """A closed loop: a request that ends is followed by a new one, until the time is over."""

    urls: tuple[str, ...]  # assigned to streams in turn
    model: str
    streams: int
    tokens: int
    stream_seconds: float  # about the duration of one stream: the first ones start spread over this time
    warm_up: float  # seconds before measuring begins
    seconds: float  # of measuring
    prompt_bytes: int = 2048  # half of it is one of `prefixes`, the rest is new
    prefixes: int = 16
    limit: float = 60.0  # timeout of a request in seconds


@dataclass(slots=True, eq=False)
class Findings:
    """The measured values; times in ms, one per request or token."""

    first: "array[float]" = field(default_factory=lambda: array("d"))  # to the first token, without the replica's time
    ttft: "array[float]" = field(default_factory=lambda: array("d"))  # to the first token, including the replica's time
    later: "array[float]" = field(
        default_factory=lambda: array("d")
    )  # from the replica's write, all tokens but the first
    gaps: "array[float]" = field(default_factory=lambda: array("d"))  # between tokens
    num_ended: int = 0
    errors: Counter[str] = field(default_factory=Counter[str])

    def as_dict(self) -> dict[str, Any]:
        """Return percentiles and counts."""
        found: dict[str, Any] = {
            f"{name}_p{rank}_ms": percentile(values, rank) if values else None
            for name in ("first", "ttft", "later", "gaps")
            for values in [cast("Sequence[float]", getattr(self, name))]
            for rank in (50, 90, 99)
        }
        return found | {"requests": self.num_ended, "tokens": len(self.first) + len(self.later)}


class Client:
    """All streams of a plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.findings = Findings()
        self.is_open = True  # new requests may begin
        self.since = self.until = float("inf")  # bounds of the measured interval
        half = plan.prompt_bytes // 2
        self._prefixes = [f"{index:4} {'a shared prefix ' * (half // 16)}"[:half] for index in range(plan.prefixes)]
        self._fill = "and a question that was not sent before. " * (half // 40 + 1)
        self._num_sent = 0

    def request(self, host: str) -> bytes:
        """Return the bytes of the next request."""
        self._num_sent += 1
        prefix = self._prefixes[self._num_sent % len(self._prefixes)]
        question = f"{self._num_sent:8} {self._fill}"[: self.plan.prompt_bytes - len(prefix)]
        messages = [{"role": "system", "content": prefix}, {"role": "user", "content": question}]
        asked = {"model": self.plan.model, "messages": messages, "max_tokens": self.plan.tokens, "stream": True}
        body = json.dumps({**asked, "stream_options": {"include_usage": True}}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body

    def fail(self, why: str) -> None:
        """Record an error; too many end the run."""
        self.findings.errors[why] += 1
        if self.findings.errors.total() > _MAX_ERRORS:
            self.is_open = False


class Stream(asyncio.Protocol):
    """One connection with one request at a time."""

    def __init__(self, client: Client, host: str) -> None:
        self._client, self._host = client, host
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._tail = b""
        self._sent = self._last = self._now = 0.0
        self._count, self._is_done = 0, False
        self._busy = False
        self.ended = asyncio.Event()  # of the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._begin()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._busy and self._client.is_open:
            self._client.fail(f"the connection was closed after {self._count} tokens")
        self._busy = False
        self.ended.set()

    def data_received(self, data: bytes) -> None:
        self._now = time.monotonic()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._close(f"no HTTP: {error}")

    def on_message_begin(self) -> None:
        self._tail = b""

    def on_body(self, body: bytes) -> None:
        events, mark, self._tail = (self._tail + body).rpartition(b"\n")
        if not mark:
            return
        client, now = self._client, self._now
        findings, is_measured = client.findings, client.since <= now < client.until
        for one, other in _STAMPS.findall(events):
            self._count += 1
            if is_measured and other:
                total = now - self._sent
                findings.ttft.append(total * 1e3)
                findings.first.append((total - float(other) + float(one)) * 1e3)
            elif is_measured:
                findings.later.append((now - float(one)) * 1e3)
                findings.gaps.append((now - self._last) * 1e3)
            self._last = now
        self._is_done = self._is_done or _DONE in events

    def on_message_complete(self) -> None:
        client, status = self._client, self._parser.get_status_code()
        if status != 200:
            self._close(f"HTTP {status}")
            return
        if self._count != client.plan.tokens or not self._is_done:
            self._close(f"{self._count} tokens of {client.plan.tokens}" + ("" if self._is_done else ", no [DONE]"))
            return
        if client.since <= self._now < client.until:
            client.findings.num_ended += 1
        self._busy = False
        if not self._parser.should_keep_alive():
            self._close()
        else:
            asyncio.get_running_loop().call_soon(self._begin)  # the parser has not finished with this message yet

    def check(self, now: float) -> None:
        """Abort a request that exceeds the time limit."""
        if self._busy and now - self._sent > self._client.plan.limit:
            self._close(f"not over after {self._client.plan.limit:.0f} s")

    def _begin(self) -> None:
        if self._transport is None:
            return
        if not self._client.is_open:
            self._close()
            return
        self._count, self._is_done, self._busy = 0, False, True
        request = self._client.request(self._host)
        self._sent = self._last = time.monotonic()
        self._transport.write(request)

    def _close(self, why: str = "") -> None:
        if why:
            self._client.fail(why)
        self._busy = False
        if self._transport is not None:
            self._transport.close()


async def run(plan: Plan) -> dict[str, Any]:
    """Keep the streams open and return the findings of the interval between the two printed lines."""
    client, loop, open_streams = Client(plan), asyncio.get_running_loop(), set[Stream]()
    start = time.monotonic()
    client.since = start + plan.warm_up
    client.until = client.since + plan.seconds

    async def keep(index: int) -> None:
        url = urlsplit(plan.urls[index % len(plan.urls)])
        host, port = url.hostname or "", url.port or 80
        await asyncio.sleep(index * plan.stream_seconds / plan.streams)
        while client.is_open:
            try:
                _, stream = await loop.create_connection(lambda: Stream(client, url.netloc), host, port)
            except OSError as error:
                client.fail(f"no connection: {error.strerror or error}")
                await asyncio.sleep(_PAUSE)
                continue
            open_streams.add(stream)
            await stream.ended.wait()
            open_streams.discard(stream)
            await asyncio.sleep(_PAUSE if client.is_open else 0)

    async def watch() -> None:
        while True:
            await asyncio.sleep(1.0)
            for stream in tuple(open_streams):
                stream.check(time.monotonic())

    watching = loop.create_task(watch())
    keeping = [loop.create_task(keep(index)) for index in range(plan.streams)]
    await asyncio.sleep(client.since - time.monotonic())
    print(json.dumps({"at": "begin"}), flush=True)
    before = time.process_time()
    await asyncio.sleep(max(client.until - time.monotonic(), 0))
    cpu = time.process_time() - before
    print(json.dumps({"at": "end"}), flush=True)
    client.is_open = False
    ended, _ = await asyncio.wait(keeping, timeout=plan.limit)
    for task in (watching, *keeping):
        task.cancel()
    for task in ended:
        task.result()  # re-raises our own errors
    return client.findings.as_dict() | {"errors": dict(client.findings.errors), "client_cpu_seconds": cpu}


def main() -> None:
    """Run the plan of the command line."""
    given: dict[str, Any] = json.loads(sys.argv[1])
    print(json.dumps(uvloop.run(run(Plan(**(given | {"urls": tuple(given["urls"])}))))), flush=True)


if __name__ == "__main__":
    main()
