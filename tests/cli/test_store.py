"""`headstart store`: what it shows, what it finds, what it removes, and what it refuses."""

import io
import json
import os
import sys
from array import array
from pathlib import Path
from typing import Any

import pytest
from redis_server import RedisServer

from headstart.cli import main as cli
from headstart.cli import store as cli_store
from headstart.core.cache.block_store import BlockKey
from headstart.core.cache.hashing import BlockHash
from headstart.store.catalog import SegmentCatalog
from headstart.store.files import read_or_create_folder_secret
from headstart.store.format import StoredBlockFormat

BLOCK_BYTES = 5000
SHAPE = StoredBlockFormat(b"m" * 32, 16, BLOCK_BYTES)


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store with 3 blocks of one model and 2 of another."""
    fill(tmp_path / "kv", SHAPE, 3)
    fill(tmp_path / "kv", SHAPE._replace(fingerprint=b"n" * 32), 2)
    return tmp_path / "kv"


def fill(folder: Path, shape: StoredBlockFormat, num_blocks: int) -> None:
    catalog = SegmentCatalog(folder, shape, 64 << 20)
    catalog.refresh_from_other_writers()
    assert catalog.write_new_blocks(blocks(num_blocks)) == num_blocks
    catalog.close()


def blocks(num_blocks: int) -> list[tuple[BlockKey, bytes]]:
    keys = [
        BlockKey(BlockHash(bytes([i]) * 32), BlockHash(b"p" * 32), array("i", [i] * SHAPE.block_size).tobytes())
        for i in range(1, num_blocks + 1)
    ]
    return [(key, key.block_hash[:1] * BLOCK_BYTES) for key in keys]


def segment(folder: Path, fingerprint: bytes = SHAPE.fingerprint) -> Path:
    """The file with the blocks of one model."""
    return next(path for path in folder.glob("*.kv") if fingerprint in path.read_bytes()[:256])


def damage(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


def store(*arguments: object) -> int:
    return cli.main(["store", *map(str, arguments)])


def as_json(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_stat_lists_what_each_model_has(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert store("stat", folder, "--json") == 0
    found = as_json(capsys)
    assert [(model["blocks"], model["block_size"], model["block_bytes"]) for model in found["models"]] == [
        (3, 16, BLOCK_BYTES),
        (2, 16, BLOCK_BYTES),
    ]
    assert (found["files"], found["odd"]) == (2, {}) and found["bytes"] >= 5 * BLOCK_BYTES
    assert found["models"][0]["model"] == SHAPE.fingerprint.hex()
    assert store("stat", folder) == 0
    shown = capsys.readouterr().out
    assert SHAPE.fingerprint.hex()[:12] in shown and " 48 " in shown and "files: 2" in shown and "ago" in shown


def test_a_sound_store_verifies_and_a_damaged_one_says_what_and_where(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert store("verify", folder) == 0
    assert "5 blocks" in (told := capsys.readouterr()).out and "damaged files: 0" in told.out
    path = segment(folder)
    damage(path, path.read_bytes().find(b"\2" * BLOCK_BYTES) + 17)
    assert store("verify", folder) == 1
    shown = capsys.readouterr().out
    assert f"{path}: blocks are not what was written" in shown and "4 blocks" in shown
    assert store("verify", folder, "--json") == 1
    found = as_json(capsys)
    assert (found["sound"], found["blocks"], found["bad"]) == (False, 4, {path.name: {"corrupt": 1}})


def test_every_reason_there_is_has_words(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = segment(folder), segment(folder, b"n" * 32)
    damage(first, 100)
    second.rename(folder / ("0" * 16 + ".kv"))
    (folder / ("1" * 16 + ".kv")).symlink_to("/dev/zero")
    (folder / ("2" * 16 + ".kv")).write_bytes(b"PK\3\4" + bytes(500))
    os.mkfifo(folder / ("3" * 16 + ".kv"))
    assert store("verify", folder, "--json") == 1
    reasons = {reason for counts in as_json(capsys)["bad"].values() for reason in counts}
    assert {"swapped", "unsafe", "magic"} <= reasons <= cli_store._MEANINGS.keys() and len(reasons) == 4
    assert store("stat", folder) == 0
    assert capsys.readouterr().out.count("left aside: ") == 4


def test_a_file_of_another_version_is_no_damage(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = bytearray(segment(folder).read_bytes())
    data[8] += 1
    segment(folder).write_bytes(data)
    code = store("verify", folder, "--json")
    found = as_json(capsys)
    assert [*found["bad"].values()] == [{"version": 1}] and found["sound"] and code == 0


def test_clear_removes_blocks_and_nothing_else(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    secret = read_or_create_folder_secret(folder)
    (folder / "notes.txt").write_text("mine", encoding="utf-8")
    assert store("clear", folder, "--yes", "--json") == 0
    found = as_json(capsys)
    assert found["files"] == 2 and found["bytes"] >= 5 * BLOCK_BYTES
    assert sorted(path.name for path in folder.iterdir() if path.name != "lock") == ["notes.txt", "secret"]
    assert read_or_create_folder_secret(folder) == secret
    assert store("clear", folder, "--yes") == 0
    assert "(files: 0)" in capsys.readouterr().out


@pytest.mark.parametrize(("answer", "is_cleared"), [("y\n", True), ("\n", False), ("no\n", False), ("", False)])
def test_clear_asks_first(
    answer: str,
    is_cleared: bool,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = io.StringIO(answer)
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdin", terminal)
    assert store("clear", folder) == 0
    shown = capsys.readouterr()
    assert "(files: 2)" in shown.err and ("removed " in shown.out) is is_cleared
    assert ("nothing was removed" in shown.err) is not is_cleared
    assert bool(list(folder.glob("*.kv"))) is not is_cleared


def test_clear_removes_nothing_without_a_terminal_to_confirm(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    assert store("clear", folder) == 2
    assert "use --yes" in capsys.readouterr().err and len(list(folder.glob("*.kv"))) == 2


@pytest.mark.parametrize("verb", ["stat", "verify", "clear"])
def test_what_is_no_store_is_refused(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "important.kv").write_text("not ours", encoding="utf-8")
    assert store(verb, tmp_path, *(["--yes"] if verb == "clear" else [])) == 2
    assert "is no store" in capsys.readouterr().err and (tmp_path / "important.kv").exists()
    for path in (tmp_path / "nowhere", tmp_path / "important.kv"):
        assert store(verb, path) == 2
        assert "is no folder" in capsys.readouterr().err


# A server -----------------------------------------------------------------------------------------------------------


def test_of_a_server_it_shows_sizes_finds_damage_and_clears_only_blocks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    redis, tiers = pytest.importorskip("redis"), pytest.importorskip("headstart.store.tiers.redis_tier")
    monkeypatch.setenv("HEADSTART_KV_STORE_PASSWORD", "hunter2")
    server = RedisServer(tmp_path, "--requirepass", "hunter2")
    for secret, num_blocks in ((b"a" * 32, 3), (b"b" * 32, 2)):
        tier = tiers.RedisTier(server.url, "hunter2", SHAPE, secret, 600)
        assert tier.write_new_blocks(blocks(num_blocks)) == num_blocks
    client = redis.Redis(port=server.port, password="hunter2")
    client.set("mine", "1")
    assert store("stat", server.url, "--json") == 0
    found = as_json(capsys)
    assert [model["blocks"] for model in found["models"]] == [3, 2] and found["bytes"] > 5 * BLOCK_BYTES
    assert store("stat", server.url) == store("verify", server.url) == 0
    assert "5 blocks" in capsys.readouterr().out
    client.setrange(next(client.scan_iter("headstart:kv:*:b:*")), 99, b"damage")
    assert store("verify", server.url, "--json") == 1 and as_json(capsys)["bad"] == {"value-checksum": 1}
    assert store("clear", server.url) == 2 and store("clear", server.url, "--yes") == 0
    assert "removed 5 blocks" in capsys.readouterr().out and client.keys() == [b"mine"]
    monkeypatch.setenv("HEADSTART_KV_STORE_PASSWORD", "wrong")
    assert store("stat", server.url) == 2 and "invalid username-password" in capsys.readouterr().err
    server.kill()
    assert store("stat", server.url) == 2 and "refused" in capsys.readouterr().err
    assert store("stat", f"{tmp_path},{server.url}") == 2 and "one at a time" in capsys.readouterr().err


def test_ctrl_c_ends_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli_store.inspect, "verify_folder", interrupted)
    assert store("verify", folder) == 130
