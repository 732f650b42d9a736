"""`headstart ps`: the servers and routers of this machine, by their processes."""

import json
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, Any

import typer

from headstart.cli.client_request import call_server
from headstart.core.errors import HeadstartError

VERBS = ("serve", "route")
WAIT_SECONDS = 2.0


def ps(
    as_json: Annotated[bool, typer.Option("--json", help="A JSON list.")] = False,
) -> None:
    """List the servers and routers that run on this machine: process, address, state, model, time since the start."""
    found = list(_servers())
    if as_json:
        print(json.dumps(found))
        return
    if not found:
        print("no server runs on this machine; start one: headstart serve")
        return
    print(f"{'pid':>8}  {'address':<28} {'verb':<6} {'state':<14} {'up':>8}  model")
    for one in found:
        up = f"{one['seconds'] // 3600}:{one['seconds'] // 60 % 60:02d}:{one['seconds'] % 60:02d}"
        print(f"{one['pid']:>8}  {one['url'] or '-':<28} {one['verb']:<6} {one['state']:<14} {up:>8}  {one['model']}")


def _servers() -> Iterator[dict[str, Any]]:
    import psutil

    from headstart.http.logs import escape_unprintable

    for process in psutil.process_iter(["cmdline"]):
        verb = serving_verb_of(process.info["cmdline"] or [])
        if verb is None:
            continue
        try:
            listening = [one for one in process.net_connections("inet") if one.status == psutil.CONN_LISTEN]
            seconds = int(time.time() - process.create_time())
        except psutil.Error:  # it has ended, or is another user's
            continue
        url = min((_url(one.laddr.ip, one.laddr.port) for one in listening), default=None)
        state, model = ("starting", "-") if url is None else _asked(url)
        answer = {"pid": process.pid, "url": url, "verb": verb, "state": state, "model": escape_unprintable(model)}
        yield answer | {"seconds": seconds}


def serving_verb_of(words: list[str]) -> str | None:
    """Return the verb of a command line that serves: `headstart serve ...`, `python -m headstart route ...`."""
    for before, word in pairwise(words):
        if word in VERBS and before.replace("\\", "/").split("/")[-1] in ("headstart", "__main__.py"):
            return word
    return None


def _url(ip: str, port: int) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "127.0.0.1"}.get(ip, f"[{ip}]" if ":" in ip else ip)
    return f"http://{host}:{port}"


def _asked(url: str) -> tuple[str, str]:
    """Return the state of a server and the model that it serves, as far as it says so."""
    try:
        call_server(url, "GET", "/health", timeout=WAIT_SECONDS)
    except HeadstartError as error:
        return ("loading" if "loading" in str(error) else "not ready"), "-"
    try:
        models = call_server(url, "GET", "/v1/models", timeout=WAIT_SECONDS)["data"]
        return "ready", ", ".join(str(model["id"]) for model in models[:4])
    except (HeadstartError, LookupError, TypeError):
        return "ready", "-"
