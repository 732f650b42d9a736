"""Absurd lists of replicas: one line at the start, and the last good list while a router runs."""

import asyncio
import json
import os
from pathlib import Path

import pytest
from gateway.test_file_discovery import A, B, replace, watching
from server.harness import until

from headstart.core.errors import ConfigError
from headstart.gateway.discovery.discovery import MAX_REPLICAS, DnsDiscovery, FileDiscovery, read_replica_file
from headstart.gateway.replicas.replica_address import MAX_ADDRESS, parse_replica_address
from headstart.http.logs import ServerLog

MANY = [f"http://10.{n >> 16}.{n >> 8 & 255}.{n & 255}:80" for n in range(MAX_REPLICAS + 1)]
ABSURD = [
    pytest.param("[" * 100_000, "nested too deeply", id="nested lists"),
    pytest.param('[{"url":' * 100_000, "nested too deeply", id="nested objects"),
    pytest.param('["http://a:1", {"url": ' + "[" * 100_000, "nested too deeply", id="nested entry"),
    pytest.param("\n".join(MANY), f"{MAX_REPLICAS + 1} replicas", id="many lines"),
    pytest.param(json.dumps(MANY), f"{MAX_REPLICAS + 1} replicas", id="many entries"),
    pytest.param("#" * (2**23 + 1), "more than 8 MiB", id="long file"),
    pytest.param("http://" + "a" * 1_000_000, f"{MAX_ADDRESS} characters", id="long line"),
    pytest.param(json.dumps(["a" * 1_000_000]), f"{MAX_ADDRESS} characters", id="long entry"),
    pytest.param("[" + "9" * 5_000 + "]", "is none", id="long number"),
    pytest.param('["http://a\\ud800:1"]', "is no address", id="half a character"),
    pytest.param('["http://a\\u0000:1"]', "is no address", id="a control character"),
    pytest.param('["http://a\\nb:1"]', "is no address", id="a line feed"),
    pytest.param("http://a b:1", "is no address", id="a space"),
]


@pytest.mark.parametrize(("text", "complaint"), ABSURD)
def test_an_absurd_list_is_refused_in_one_short_line(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "list").write_text(text)
    with pytest.raises(ConfigError, match=complaint) as caught:
        read_replica_file(tmp_path / "list")
    assert len(str(caught.value)) < 1_000 and "\n" not in str(caught.value)


def test_as_many_replicas_as_the_bound_are_taken(tmp_path: Path) -> None:
    (tmp_path / "list").write_text("\n".join(MANY[:-1]))
    assert len(read_replica_file(tmp_path / "list")) == MAX_REPLICAS


@pytest.mark.parametrize("kind", ["fifo", "folder", "device"])
def test_what_is_no_regular_file_is_refused_and_not_waited_for(tmp_path: Path, kind: str) -> None:
    path = tmp_path / kind
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path = Path("/dev/zero")

    async def go() -> None:
        await FileDiscovery(path).watch_replicas(lambda _: None)

    with pytest.raises(ConfigError, match=r"it is no regular file|Is a directory"):
        asyncio.run(asyncio.wait_for(go(), 60))


@pytest.mark.parametrize(("text", "complaint"), ABSURD)
def test_an_absurd_list_changes_nothing_while_it_is_watched(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "list"

    async def go() -> None:
        path.write_text(A)
        async with watching(path) as watched:
            replace(path, text)
            await until(lambda: "going on with the 1 replicas known" in watched.told.getvalue())
            replace(path, B)
            await until(lambda: len(watched.lists) == 2)
            assert watched.lists == [[A], [B]] and watched.told.getvalue().count("going on") == 1

    asyncio.run(go())


def test_a_file_that_becomes_a_fifo_while_it_is_watched_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "list"

    async def go() -> None:
        path.write_text(A)
        async with watching(path) as watched:
            os.mkfifo(tmp_path / "fifo")
            os.replace(tmp_path / "fifo", path)
            await until(lambda: "it is no regular file" in watched.told.getvalue())
            replace(path, B)
            await until(lambda: len(watched.lists) == 2)

    asyncio.run(go())


def test_a_name_with_too_many_addresses_gives_so_many_and_keeps_those_known(capsys: pytest.CaptureFixture[str]) -> None:
    hosts = [f"10.{n >> 16}.{n >> 8 & 255}.{n & 255}" for n in range(MAX_REPLICAS + 50)]
    answers = [hosts[-1:], hosts, hosts]
    lists: list[list[str]] = []

    async def resolve(name: str, port: int) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        found = answers.pop(0) if len(answers) > 1 else answers[0]
        return [(0, 0, 0, "", (host, port)) for host in found]

    async def go() -> None:
        discovery = DnsDiscovery("many", 80, log=ServerLog(), ask_seconds=0.0, resolve=resolve)
        task = asyncio.create_task(
            discovery.watch_replicas(lambda found: lists.append([address.url for address in found]))
        )
        await until(lambda: len(lists) == 2 and len(answers) == 1)
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(go())
    assert len(lists) == 2 and len(lists[1]) == MAX_REPLICAS and lists[0][0] in lists[1]
    assert capsys.readouterr().err.count(f"more than {MAX_REPLICAS} addresses") == 1


@pytest.mark.parametrize("text", ["http://a:1", "10.0.0.7:8000", "https://[::1]:8443/v1/", "http://host-1_x.svc:80"])
def test_ordinary_addresses_stay_addresses(text: str) -> None:
    assert parse_replica_address(text).url.startswith("http")


def test_an_endpoint_of_events_is_bounded_and_printable() -> None:
    with pytest.raises(ConfigError, match="characters"):
        parse_replica_address("http://a:1,events=tcp://" + "a" * 5_000)
    with pytest.raises(ConfigError, match="says nothing"):
        parse_replica_address("http://a:1,events=tcp://a\x00:1")
