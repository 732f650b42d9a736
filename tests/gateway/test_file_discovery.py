"""A file that lists replicas: its two forms, what is wrong with it, and what becomes of it while it is watched."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from io import StringIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from server.harness import until

from headstart.core.errors import ConfigError
from headstart.gateway.discovery import discovery as discover_file
from headstart.gateway.discovery.discovery import FileDiscovery, read_replica_file
from headstart.gateway.replicas.replica_address import ReplicaAddress
from headstart.http.logs import ServerLog

A, B = "http://10.0.0.1:8000", "http://10.0.0.2:8000"


class Watched:
    """A watch under way: the lists it has told, and what it wrote for people."""

    def __init__(self) -> None:
        self.lists: list[list[str]] = []
        self.told = StringIO()

    def changed(self, addresses: Sequence[ReplicaAddress]) -> None:
        self.lists.append([address.url for address in addresses])


@asynccontextmanager
async def watching(path: Path) -> AsyncIterator[Watched]:
    watched = Watched()
    discovery = FileDiscovery(path, log=ServerLog(watched.told), poll_seconds=0.01)
    task = asyncio.create_task(discovery.watch_replicas(watched.changed))
    try:
        await until(lambda: watched.lists or task.done())
        yield watched
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def replace(path: Path, text: str) -> None:
    """Another file in its place, whole at once."""
    scratch = path.with_suffix(".new")
    scratch.write_text(text)
    os.replace(scratch, path)


def test_lines_may_hold_comments_events_and_nothing(tmp_path: Path) -> None:
    (tmp_path / "list").write_text(f"# ours\n\n{A}  # the first\n 10.0.0.2:8000,events=tcp://10.0.0.2:5557\n{A}\n")
    assert read_replica_file(tmp_path / "list") == (ReplicaAddress(A), ReplicaAddress(B, events="tcp://10.0.0.2:5557"))


def test_a_json_list_may_hold_texts_and_objects(tmp_path: Path) -> None:
    full = {"url": B, "events": "tcp://10.0.0.2:5557", "replay": "tcp://10.0.0.2:5558"}
    (tmp_path / "list").write_text(json.dumps([A, full, {"url": A}]))
    assert read_replica_file(tmp_path / "list") == (ReplicaAddress(A), ReplicaAddress(**full))


@pytest.mark.parametrize("text", ["", "\n# nobody yet\n", "[]"])
def test_an_empty_list_is_a_list(tmp_path: Path, text: str) -> None:
    (tmp_path / "list").write_text(text)
    assert read_replica_file(tmp_path / "list") == ()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("http://a:1\nhttp://b:x\n", "line 2: replica 'http://b:x' is no address"),
        ('["http://a:1", ', "it begins like a JSON list and is none"),
        ('["http://a:1", 7]', 'entry 2: write it like "http'),
        ('[{"url": "http://a:1", "port": "2"}]', 'entry 1: write it like "http'),
        ('[{"url": 7}]', "entry 1: url, ranks, events and replay must be texts"),
        ('[{"url": "http://a:1", "replay": "tcp://a:1"}]', "entry 1: .*replay is of no use without events"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "list").write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        read_replica_file(tmp_path / "list")


@given(st.lists(st.tuples(st.integers(1, 254), st.integers(1, 65535)), max_size=8))
def test_both_forms_say_the_same(tmp_path_factory: pytest.TempPathFactory, hosts: list[tuple[int, int]]) -> None:
    urls = [f"http://10.0.0.{host}:{port}" for host, port in hosts]
    lines, listed = (tmp_path_factory.getbasetemp() / name for name in ("lines", "listed"))
    lines.write_text("\n".join(urls))
    listed.write_text(json.dumps(urls))
    found = read_replica_file(lines)
    assert [address.url for address in found] == list(dict.fromkeys(urls)) and read_replica_file(listed) == found


def test_a_file_that_cannot_be_read_at_first_is_a_mistake(tmp_path: Path) -> None:
    async def run(path: Path) -> None:
        await FileDiscovery(path).watch_replicas(lambda _: None)

    with pytest.raises(ConfigError, match=r"cannot read .*nope: No such file"):
        asyncio.run(run(tmp_path / "nope"))
    (tmp_path / "bytes").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="not UTF-8 at byte 0"):
        asyncio.run(run(tmp_path / "bytes"))


@pytest.mark.parametrize("text", ["", "\n", "# being written\n"])
def test_a_file_that_becomes_empty_keeps_its_last_list_and_an_empty_list_does_not(tmp_path: Path, text: str) -> None:
    path = tmp_path / "list"

    async def run() -> None:
        path.write_text(A)
        async with watching(path) as watched:
            replace(path, text)
            await until(lambda: "is empty" in watched.told.getvalue())
            assert watched.lists == [[A]] and "going on with the 1 replicas known" in watched.told.getvalue()
            replace(path, "[]")
            await until(lambda: len(watched.lists) == 2)
            replace(path, text)  # nothing is lost by it
            await until(lambda: watched.told.getvalue().count("lists 0 replicas") == 1)
            assert watched.lists == [[A], []]

    asyncio.run(run())


def test_a_list_that_changes_is_told_and_may_become_empty(tmp_path: Path) -> None:
    path = tmp_path / "list"

    async def run() -> None:
        path.write_text(A)
        async with watching(path) as watched:
            assert watched.lists == [[A]]
            replace(path, f"{A}\n{B}")
            await until(lambda: len(watched.lists) == 2)
            replace(path, "[]")
            await until(lambda: len(watched.lists) == 3)
            assert watched.lists == [[A], [A, B], []]

    asyncio.run(run())


def test_a_broken_file_is_told_once_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "list"
    reads: list[Path] = []

    def counted(path: Path, **options: bool) -> tuple[ReplicaAddress, ...]:
        reads.append(path)
        return read_replica_file(path, **options)

    monkeypatch.setattr(discover_file, "read_replica_file", counted)

    async def run() -> None:
        path.write_text(A)
        async with watching(path) as watched:
            replace(path, "http://b:x")
            await until(lambda: "line 1" in watched.told.getvalue())
            before = len(reads)
            replace(path, "http://b:x")  # another file with the same mistake
            await until(lambda: len(reads) > before)
            path.unlink()
            await until(lambda: "No such file" in watched.told.getvalue())
            replace(path, f"{B}\n")
            await until(lambda: len(watched.lists) == 2)
            assert watched.lists == [[A], [B]]
            assert watched.told.getvalue().count("is no address") == 1
            assert watched.told.getvalue().count("No such file") == 1

    asyncio.run(run())


def test_the_same_list_in_another_file_is_no_change(tmp_path: Path) -> None:
    path = tmp_path / "list"

    async def run() -> None:
        path.write_text(A)
        async with watching(path) as watched:
            replace(path, f"# the same\n{A}")
            replace(path, f"# the same\n{A}\n{B}")
            await until(lambda: len(watched.lists) == 2)
            replace(path, f"{A}\n{B}\n# and again")
            replace(path, "[]")
            await until(lambda: len(watched.lists) == 3)
            assert watched.lists == [[A], [A, B], []]

    asyncio.run(run())


def test_a_file_that_is_being_written_is_read_when_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "list"
    sizes = [1, 10, 20, 30, 30]  # at first, and then look by look
    looks = iter(sizes)
    read_after: list[int] = []
    num_looks = 0

    def look(path: Path) -> tuple[int, int, int]:
        nonlocal num_looks
        num_looks += 1
        return 0, next(looks, sizes[-1]), 0

    def counted(path: Path, **options: bool) -> tuple[ReplicaAddress, ...]:
        read_after.append(num_looks)
        return read_replica_file(path, **options)

    monkeypatch.setattr(discover_file, "_look", look)
    monkeypatch.setattr(discover_file, "read_replica_file", counted)

    async def run() -> None:
        path.write_text(A)
        async with watching(path):
            await until(lambda: num_looks > len(sizes) + 2)

    asyncio.run(run())
    assert read_after == [1, len(sizes)]
