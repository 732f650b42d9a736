"""Tenants and the store, over the wire: two real servers on one folder, and one that comes after them.

Each claim has its positive control beside it: what must not be loaded by another is loaded by its owner. The servers
run without a umask, so that nothing but their own care keeps the files private, and prefer the store to computing
(patience.py), so that who may load does load.
"""

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from server import patient
from server.harness import Server, spawn, wait_for

from headstart.model.weights.init_model import write_random_model

BLOCK, MAX_TOKENS = 16, 8
PUBLIC = "You are the assistant of a small library. Answer in one sentence, name your source, and never guess. " * 4
PRIVATE = "Beta's own instructions, which are nobody else's business at all: be brief, be polite, be right. " * 4
CONFIG = f"""
admin_api_key = "root-of-all-keys"
api_key = "single-key"

[[tenant]]
name = "acme-corporation"
api_keys = ["acme-key-1", "acme-key-2"]

[[tenant]]
name = "beta-corporation"
api_keys = ["beta-key-1"]

[[prefix]]
name = "library"
text = "{PUBLIC}"

[[prefix]]
name = "beta-own"
tenant = "beta-corporation"
text = "{PRIVATE}"
"""
KEYS = ("acme-key-1", "acme-key-2", "beta-key-1", "single-key", "root-of-all-keys")
ROOT = {"authorization": "Bearer root-of-all-keys"}


class Reply:
    """One caller's view of one answer, and the work of the server's store for it."""

    def __init__(self, answer: dict[str, Any], before: dict[str, Any], after: dict[str, Any]) -> None:
        self.text: str = answer["choices"][0]["text"]
        self.prompt: int = answer["usage"]["prompt_tokens"]
        self.cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        store, was = after["store"], before["store"]
        self.loaded = store["loaded_blocks"] - was["loaded_blocks"]  # blocks
        self.missed = sum(store["misses"].values()) - sum(was["misses"].values())
        self.from_store = after["prompt_tokens"]["store"] - before["prompt_tokens"]["store"]  # tokens

    @property
    def reusable(self) -> int:
        """Tokens of the prompt that its owner finds when it asks again."""
        return min(self.prompt // BLOCK * BLOCK, self.prompt - 1)

    @property
    def new_blocks(self) -> int:
        """Blocks that it computed and published."""
        return (self.prompt + MAX_TOKENS - 1) // BLOCK - -(-self.cached // BLOCK)

    @property
    def asked_the_store(self) -> bool:
        return bool(self.loaded or self.missed or self.from_store)


def stats(server: Server) -> dict[str, Any]:
    return server.get("/v1/cache/stats", headers=ROOT).json()


class Store:
    """A folder, servers on it, and how many blocks must have got there."""

    def __init__(self, room: Path, stack: ExitStack) -> None:
        self.folder = room / "store"
        self.num_blocks = 0
        self._seen: set[tuple[str, str, str]] = set()
        self._room, self._stack, self._num_servers = room, stack, 0
        self._model = write_random_model("tiny", room / "tiny", std=0.2, dtype="float32", progress=False)
        (room / "headstart.toml").write_text(CONFIG, encoding="utf-8")

    def start(self) -> Server:
        self._num_servers += 1
        options = ["--port", "0", "--num-blocks", "512", "--max-model-len", "1024", "--kv-store", str(self.folder)]
        command = [*patient.COMMAND, "serve", str(self._model), *options]
        command += ["--config", str(self._room / "headstart.toml")]
        server = self._stack.enter_context(spawn(command, self._room / f"log{self._num_servers}", umask=0))
        return server.wait_ready()

    def ask(self, server: Server, key: str, prompt: str, **fields: Any) -> Reply:
        body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, **fields}
        before = stats(server)
        headers = {"authorization": f"Bearer {key}"}
        answer = server.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        reply = Reply(answer.json(), before, stats(server))
        owner = (key.rsplit("-key-", 1)[0], fields.get("cache_salt", ""), prompt)
        if "cache" not in fields and owner not in self._seen:
            self._seen.add(owner)
            self.num_blocks += reply.new_blocks
        return reply

    def wait_written(self, *servers: Server) -> None:
        """Waits until every server knows of all blocks that were ever computed."""
        for server in servers:
            wait_for(lambda server=server: stats(server)["store"]["blocks"] >= self.num_blocks)
            assert stats(server)["store"]["blocks"] == self.num_blocks


def story(name: str) -> str:
    """A prompt of its own for one test."""
    return f"{name}. " + " ".join(f"{name} counted {number} sheep on the hill and went on." for number in range(20))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with ExitStack() as stack:
        yield Store(tmp_path_factory.mktemp("store"), stack)


@pytest.fixture(scope="module")
def pair(store: Store) -> tuple[Server, Server]:
    """Two servers; the second comes when the first has written its pinned prefixes."""
    first = store.start()
    store.num_blocks = stats(first)["blocks"]["pinned"]
    store.wait_written(first)
    return first, store.start()


def test_the_second_server_loads_the_pinned_prefixes_and_computes_none(pair: tuple[Server, Server]) -> None:
    first, second = map(stats, pair)
    assert first["blocks"]["pinned"] == second["blocks"]["pinned"] > 12
    assert second["store"]["loaded_blocks"] == second["blocks"]["pinned"]
    assert second["prefill_tokens"] < BLOCK * 3 < first["prefill_tokens"]  # what is behind the last whole block
    assert second["store"]["written_blocks"] == 0


def test_a_tenant_loads_what_it_computed_elsewhere_and_no_other_ever_does(
    store: Store, pair: tuple[Server, Server]
) -> None:
    first, second = pair
    prompt = story("Ada")
    cold = store.ask(first, "acme-key-1", prompt)
    assert cold.cached == 0 and not cold.asked_the_store and cold.reusable >= 128
    store.wait_written(first, second)
    for key in ("beta-key-1", "single-key", "root-of-all-keys"):  # while all of it lies ready
        other = store.ask(second, key, prompt)
        assert (other.cached, other.asked_the_store, other.text) == (0, False, cold.text), key
    warm = store.ask(second, "acme-key-2", prompt)
    assert (warm.cached, warm.from_store, warm.text) == (cold.reusable, cold.reusable, cold.text)
    assert warm.loaded == -(-warm.reusable // BLOCK) and not warm.missed
    store.wait_written(first, second)
    back = store.ask(first, "beta-key-1", prompt)  # and the other way round: its own, which the second computed
    assert (back.cached, back.text) == (back.reusable, cold.text)


def test_a_salt_narrows_sharing_and_gives_no_access_to_other_tenants(store: Store, pair: tuple[Server, Server]) -> None:
    first, second = pair
    prompt = story("Bob")
    salted = store.ask(first, "acme-key-1", prompt, cache_salt="bobs-salt")
    store.wait_written(first, second)
    strangers: list[tuple[str, dict[str, str]]] = [
        ("acme-key-1", {}),
        ("acme-key-1", {"cache_salt": "another"}),
        ("beta-key-1", {"cache_salt": "bobs-salt"}),
        ("single-key", {"cache_salt": "bobs-salt"}),
        ("root-of-all-keys", {"cache_salt": "bobs-salt"}),
    ]
    for key, fields in strangers:
        other = store.ask(second, key, prompt, **fields)
        assert (other.cached, other.asked_the_store) == (0, False), (key, fields)
    assert store.ask(second, "acme-key-2", prompt, cache_salt="bobs-salt").from_store == salted.reusable


def test_all_share_the_public_prefix_and_nothing_behind_it(store: Store, pair: tuple[Server, Server]) -> None:
    first, second = pair
    prompt = PUBLIC + story("Cem")
    cold = store.ask(first, "acme-key-1", prompt)
    assert 96 <= cold.cached < cold.reusable
    store.wait_written(first, second)
    for key in ("beta-key-1", "single-key", "root-of-all-keys"):
        other = store.ask(second, key, prompt)
        assert (other.cached, other.asked_the_store) == (cold.cached, False), key
    warm = store.ask(second, "acme-key-1", prompt)
    assert warm.cached == cold.reusable and warm.from_store == cold.reusable - cold.cached


def test_a_request_that_bypasses_the_cache_leaves_nothing_on_disk_and_asks_for_nothing(
    store: Store, pair: tuple[Server, Server]
) -> None:
    first, second = pair
    prompt = story("Dan")
    for mode in ("bypass", "read-only"):
        store.ask(first, "acme-key-1", prompt, cache=mode)
        store.wait_written(first, second)
        assert not store.ask(second, "acme-key-1", prompt, cache="read-only").asked_the_store
    cold = store.ask(first, "acme-key-1", prompt)
    store.wait_written(first, second)
    assert not store.ask(second, "acme-key-1", prompt, cache="bypass").asked_the_store
    assert store.ask(second, "acme-key-1", prompt, cache="read-only").from_store == cold.reusable


def test_a_server_that_was_killed_comes_back_to_the_same_domains(store: Store, pair: tuple[Server, Server]) -> None:
    third, prompt = store.start(), story("Eva")
    cold = store.ask(third, "acme-key-1", prompt)
    single = store.ask(third, "single-key", prompt)
    assert cold.cached == single.cached == 0
    store.wait_written(third, *pair)
    assert third.stop(signal.SIGKILL) == -signal.SIGKILL
    again = store.start()
    assert not store.ask(again, "beta-key-1", prompt).asked_the_store
    assert store.ask(again, "acme-key-2", prompt).from_store == cold.reusable
    assert store.ask(again, "single-key", prompt).from_store == single.reusable
    assert again.stop() == 0


def test_files_are_readable_by_their_owner_only_and_name_no_tenant(store: Store, pair: tuple[Server, Server]) -> None:
    store.ask(pair[0], "acme-key-1", story("Fay"), cache_salt="a-salt-nobody-should-read")
    store.wait_written(*pair)
    assert store.folder.stat().st_mode & 0o777 == 0o700
    paths = list(store.folder.rglob("*"))
    assert len(paths) >= 3
    for path in paths:
        assert path.is_file() and path.stat().st_mode & 0o777 == 0o600, path
        content = path.read_bytes()
        for word in (*KEYS, "acme-corporation", "beta-corporation", "a-salt-nobody-should-read"):
            assert word.encode() not in content and word not in path.name, (word, path)


def test_only_an_administrator_clears_the_store_and_then_it_is_clear_for_all(
    store: Store, pair: tuple[Server, Server]
) -> None:
    first, second = pair
    prompt = story("Gus")
    cold = store.ask(first, "acme-key-1", prompt)
    store.wait_written(first, second)
    reset = "/reset_prefix_cache?reset_external=true"
    for key in ("acme-key-1", "single-key"):
        assert first.post(reset, headers={"authorization": f"Bearer {key}"}).status_code == 403
    assert stats(second)["store"]["blocks"] > cold.reusable // BLOCK
    assert first.post(reset, headers=ROOT).status_code == 200
    pinned = stats(first)["blocks"]["pinned"]  # these are offered anew
    wait_for(lambda: stats(second)["store"]["blocks"] == pinned)
    after = store.ask(second, "acme-key-1", prompt)
    assert (after.cached, after.loaded, after.text) == (0, 0, cold.text)


def test_logs_show_no_key_and_no_salt(store: Store, pair: tuple[Server, Server]) -> None:
    store.ask(pair[1], "beta-key-1", story("Hal"), cache_salt="a-salt-nobody-should-read")
    for server in pair:
        assert not [word for word in (*KEYS, "a-salt-nobody-should-read") if word in server.log]
