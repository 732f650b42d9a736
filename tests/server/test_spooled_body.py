"""Large request bodies in files: read back as written, by several readers in turn, and in memory where no file is."""

import asyncio
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from headstart.http import spooled_body
from headstart.http.body_reader import BudgetedBodyReader
from headstart.http.spooled_body import PIECE_BYTES, SpooledBody, spool_to_file

DATA = bytes(range(256)) * (3 * PIECE_BYTES // 256) + b"end"


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def collected(body: SpooledBody) -> bytes:
    return b"".join([piece async for piece in body.pieces()])


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES, PIECE_BYTES + 1, len(DATA)])
def test_a_body_in_a_file_is_read_as_it_was_written(size: int) -> None:
    body = SpooledBody(DATA[: size // 2])
    body.append(bytearray(DATA[size // 2 : size]))
    assert len(body) == size and body.read() == DATA[:size]
    assert [asyncio.run(collected(body)) for _ in range(2)] == [DATA[:size]] * 2
    body.close()
    body.close()


def test_attempts_read_a_body_independently_and_its_file_has_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = open_files()
    body = SpooledBody(DATA)
    assert open_files() == before + 1 and os.listdir(tmp_path) == []

    async def go() -> None:
        cut = body.pieces()
        first = await anext(cut)
        assert await collected(body) == DATA
        body.close()
        assert first + b"".join([piece async for piece in cut]) == DATA

    asyncio.run(go())
    body.close()
    assert open_files() == before


def request_of(*pieces: bytes) -> Request:
    messages = [
        {"type": "http.request", "body": piece, "more_body": index < len(pieces) - 1}
        for index, piece in enumerate(pieces)
    ]

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    return Request({"type": "http", "headers": []}, receive)


def test_only_bodies_above_the_bound_are_in_files_and_all_are_whole() -> None:
    reader, before = BudgetedBodyReader(1000), open_files()
    for pieces in ([b"a" * 10], [b"a" * 6, b"b" * 4], [b""]):
        assert asyncio.run(reader.read_spooling_if_large(request_of(*pieces), 10)) == b"".join(pieces)
    for pieces in ([b"a" * 11], [b"a" * 6, b"b" * 5], [b"a" * 6, b"b" * 6, b"c" * 7, b""]):
        body = asyncio.run(reader.read_spooling_if_large(request_of(*pieces), 10))
        assert isinstance(body, SpooledBody) and body.read() == b"".join(pieces)
        body.close()
    assert reader.total_held_bytes == 0 and open_files() == before


def test_the_file_of_a_body_that_is_refused_is_closed() -> None:
    reader, before = BudgetedBodyReader(30, 60), open_files()
    with pytest.raises(Exception, match="at most 30"):
        asyncio.run(reader.read_spooling_if_large(request_of(b"a" * 20, b"b" * 20), 10))
    assert reader.total_held_bytes == 0 and open_files() == before


@pytest.mark.parametrize("good_writes", [0, 1, 2])
def test_without_space_for_a_file_a_body_is_in_memory(monkeypatch: pytest.MonkeyPatch, good_writes: int) -> None:
    calls, pwrite = 0, os.pwrite

    def failing(*arguments: Any) -> int:
        nonlocal calls
        calls += 1
        if calls > good_writes:
            raise OSError(28, "No space left on device")
        return pwrite(*arguments)

    before = open_files()
    monkeypatch.setattr(spooled_body.os, "pwrite", failing)
    pieces = [b"a" * 8, b"b" * 8, b"c" * 8, b"d" * 8]
    assert asyncio.run(BudgetedBodyReader(1000).read_spooling_if_large(request_of(*pieces), 10)) == b"".join(pieces)
    assert open_files() == before
    if not good_writes:
        assert spool_to_file(b"x") is None


def test_bodies_in_files_count_as_held_while_they_arrive() -> None:
    reader = BudgetedBodyReader(100, 200)

    async def go() -> None:
        blocked = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if not blocked.is_set():
                blocked.set()
                return {"type": "http.request", "body": b"a" * 90, "more_body": True}
            await asyncio.sleep(60)
            raise AssertionError

        task = asyncio.create_task(reader.read_spooling_if_large(Request({"type": "http", "headers": []}, receive), 10))
        await blocked.wait()
        await asyncio.sleep(0)
        assert reader.total_held_bytes == 90
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert reader.total_held_bytes == 0

    before = open_files()
    asyncio.run(go())
    assert open_files() == before
