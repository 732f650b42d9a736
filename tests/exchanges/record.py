"""Records what server and router answer to a fixed list of requests, and compares two recordings byte by byte.

    python -m exchanges.record record before.jsonl     in tests/; starts a server with the bundled model, and a router
    python -m exchanges.record compare before.jsonl after.jsonl

A recording holds what was received. Comparing masks ids, times, measured rates, versions and what only depends on time:
the same id in one exchange has the same mask. All else is compared: status, headers, bodies, events. Requests are sent
one after the other, so answers and cache hits repeat.
"""

import http.client
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from exchanges.corpus import Exchange, exchanges

SERVE = ("--num-blocks", "2048", "--tool-call-parser", "hermes", "--prompt-log-size", "1000000")
START_SECONDS = 300
ANSWER_SECONDS = 120
PING = b": ping\n\n"
_ID = re.compile(
    r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|(?<![0-9a-zA-Z])[0-9a-f]{24,40}(?![0-9a-z])"
)
_PREFIXED_ID = re.compile(r"\b((?:chatcmpl|cmpl|resp|msg|rs|fc|fco|call|toolu|req)[-_])([0-9A-Za-z_]{12,})")
_TIMES = re.compile(
    r'("(?:created|created_at|completed_at|step_seconds|steps|time|age|at|[a-z_]*_(?:ms|seconds|ago|duration)|'
    r"step|stream|resident|token|pair|score|prediction_error_tokens|generation_tokens|computed_tokens|"
    r'examined|examined_[a-z]+)": ?)-?[0-9.e+-]+|(?<=prefill_ms=)[0-9.]+'
)
_RUNNING_USAGE = re.compile(r'("(?:completion_tokens|total_tokens)": ?)[0-9]+')
_HAS_RUNNING_USAGE = re.compile(r'"finish_reason":null[^]]*\],"usage":\{')  # in each event of a stream
_AGO = re.compile(r"[0-9.]+ (?:s|ms|seconds?|minutes?) ago")
_CREATED_AT = re.compile(r'("(?:created_at|modified_at)": ?)"[^"]*"')
_VERSION = re.compile(r'("version": ?)"[^"]*"')
_METRIC = re.compile(r"^([a-z][^ ]*(?:\{.*\})?) [0-9.e+Na-]+$", re.MULTILINE)
_PORT = re.compile(r"(127\.0\.0\.1:)[0-9]+")
_LEFT_OUT = ("date", "content-length", "connection", "keep-alive")


def masked(line: dict[str, Any]) -> dict[str, Any]:
    """Return a line of a recording without what differs between two runs."""
    body = line["body"]
    if line["name"].endswith(" /metrics"):
        body = "\n".join(sorted(set(_METRIC.sub(r"\1", body).splitlines())))
    if _HAS_RUNNING_USAGE.search(body):
        body = _RUNNING_USAGE.sub(r"\1T", body)
    headers = [
        [name, "T" if name == "server-timing" else _masked_text(value)]  # its phases depend on time too
        for name, value in line["headers"]
    ]
    return {**line, "headers": headers, "body": _masked_text(body)}


def _masked_text(text: str) -> str:
    seen: dict[str, str] = {}

    def number(value: str) -> str:
        return seen.setdefault(value, f"ID{len(seen)}")

    text = _PREFIXED_ID.sub(lambda match: match[1] + number(match[2]), text)
    text = _ID.sub(lambda match: number(match[0]), text)
    text = _TIMES.sub(lambda match: (match[1] or "") + "T", text)
    text = _AGO.sub("T ago", text)
    text = _CREATED_AT.sub(r'\1"T"', text)
    text = _VERSION.sub(r'\1"V"', text)
    return _PORT.sub(r"\1P", text.replace("HEAD, GET", "GET, HEAD"))  # a set's order


def record(url: str) -> Iterator[dict[str, Any]]:
    """Send all requests to a server and yield what it answered."""
    address = urlsplit(url).netloc
    ids: dict[str, str] = {}
    connection = http.client.HTTPConnection(address, timeout=ANSWER_SECONDS)
    for exchange in exchanges():
        status, headers, body = _sent(connection, exchange, ids)
        body = body.replace(PING, b"")
        found = re.search(rb'"id": ?"([^"]+)"', body)
        ids[exchange.name] = "none" if found is None else found[1].decode()
        text = body.decode("utf-8", "backslashreplace")
        kept = sorted([name.lower(), value] for name, value in headers if name.lower() not in _LEFT_OUT)
        yield {"name": exchange.name, "status": status, "headers": kept, "body": text}


def _sent(
    connection: http.client.HTTPConnection, exchange: Exchange, ids: dict[str, str]
) -> tuple[int, list[tuple[str, str]], bytes]:
    path = re.sub(r"\{id:([^}]+)\}", lambda match: ids[match[1]], exchange.path)
    data = re.sub(rb"\{id:([^}]+)\}", lambda match: ids[match[1].decode()].encode(), exchange.body)
    headers = {"Content-Type": "application/json", **dict(exchange.headers)}
    for attempt in range(2):  # the server may have closed the connection after the answer before
        try:
            connection.request(exchange.method, path, data or None, headers)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        except (http.client.HTTPException, ConnectionError):
            connection.close()
            if attempt:
                raise
    raise AssertionError


def differences(one: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each exchange whose answers differ, or that only one recording has."""
    keys = [(line["via"], line["name"]) for line in (*one, *other)]
    before, after = ({(line["via"], line["name"]): masked(line) for line in lines} for lines in (one, other))
    return [
        f"{via} {name}:\n  - {_shown(before.get((via, name)))}\n  + {_shown(after.get((via, name)))}"
        for via, name in dict.fromkeys(keys)
        if before.get((via, name)) != after.get((via, name))
    ]


def _shown(line: dict[str, Any] | None) -> str:
    return "nothing" if line is None else f"{line['status']} {line['headers']} {line['body'][:1500]}"


def _started(folder: str, name: str, *arguments: str) -> tuple[subprocess.Popen[bytes], str]:
    """Start a process of headstart that listens on a free port, and return it with its address."""
    log = Path(folder) / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "headstart", *arguments, "--port", "0"], stdout=output, stderr=output, cwd=folder
        )
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        found = re.search(r"http://127\.0\.0\.1:[0-9]+", log.read_text())
        if found is not None and _is_ready(found[0]):
            return process, found[0]
        time.sleep(0.2)
    process.kill()
    raise SystemExit(f"{name} did not start:\n{log.read_text()}")


def _is_ready(url: str) -> bool:
    try:
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=5)
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False


def _record_both(target: Path) -> None:
    with tempfile.TemporaryDirectory() as folder, target.open("w") as file:
        for via in ("server", "router"):  # a fresh server for each: cached tokens are part of the answers
            processes: list[subprocess.Popen[bytes]] = []
            try:
                server, url = _started(folder, "server", "serve", *SERVE)
                processes.append(server)
                if via == "router":
                    router, url = _started(folder, "router", "route", "--replica", url)
                    processes.append(router)
                    time.sleep(3)  # until the replica's models are listed and its statistics are read
                for line in record(url):
                    file.write(json.dumps({"via": via, **line}) + "\n")
            finally:
                for process in reversed(processes):
                    process.terminate()
                    process.wait()


def main(arguments: Sequence[str]) -> int:
    """Run the command in `arguments` and return its exit status."""
    if len(arguments) == 2 and arguments[0] == "record":
        _record_both(Path(arguments[1]))
        return 0
    if len(arguments) == 3 and arguments[0] == "compare":
        one, other = ([json.loads(line) for line in Path(path).read_text().splitlines()] for path in arguments[1:])
        lines = differences(one, other)
        print("\n".join(lines))
        print(f"{len(one)} and {len(other)} exchanges, {len(lines)} differ")
        return bool(lines)
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    raise SystemExit(main(sys.argv[1:]))
