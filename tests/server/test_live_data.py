"""The live page's files and data over HTTP: who sees what, its bounds, and its headers."""

import asyncio
import json
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from server.checked_engine import BLOCK_SIZE, build_checked
from server.harness import Inside, fake_server, inside, parse_events, until
from server.test_response_models import fits

from headstart.http.auth import Principal
from headstart.page.live_stream import MAX_STREAMS_PER_TENANT
from headstart.page.prefix_tree import COLUMNS
from headstart.server.cache_api import cache_schema, cache_tree
from headstart.server.prompt_doctor import AvoidableCounts

KEYS: dict[str, Any] = {"api_key": ("key-a", "key-b"), "admin_api_key": ("root",)}
WORDS = "the quick brown fox jumps over the lazy dog and runs through the old forest until it is dark again "
MONDAY, TUESDAY = WORDS + "on Monday at noon", WORDS + "on Tuesday at noon"
DATA = ("/v1/cache/tree", "/v1/cache/live?frames=1")


@pytest.fixture(autouse=True)
def always_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes a new snapshot for each call."""
    monkeypatch.setattr(cache_tree, "MIN_SECONDS", 0.0)
    monkeypatch.setattr(cache_tree, "ENGINE_SHARE", 1e9)
    monkeypatch.setattr(cache_tree, "SERVER_SHARE", 1e9)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


async def complete(server: Inside, prompt: Any, key: str = "") -> None:
    body = {"prompt": prompt, "max_tokens": 1}
    assert (await server.client.post("/v1/completions", json=body, headers=bearer(key))).status_code == 200


async def tree_of(server: Inside, key: str = "", query: str = "") -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The runs as objects, and the whole answer."""
    found = await server.client.get(f"/v1/cache/tree{query}", headers=bearer(key))
    assert found.status_code == 200, found.text
    answer = found.json()
    fits(cache_schema.CACHE_TREE, found.json())
    assert answer["columns"] == list(COLUMNS)
    return [dict(zip(COLUMNS, run, strict=True)) for run in answer["runs"]], answer


async def frame_of(server: Inside, key: str = "") -> dict[str, Any]:
    found = await server.client.get("/v1/cache/live?frames=1", headers=bearer(key))
    assert found.status_code == 200 and found.headers["content-type"].startswith("text/event-stream"), found.text
    (frame,) = parse_events(found.text)
    fits(cache_schema.FIGURES, frame)
    return frame


def test_the_tree_shows_where_two_prompts_part(folder: str) -> None:
    async def run() -> None:
        async with inside(folder, build_checked) as server:
            assert (await tree_of(server))[0] == []
            await complete(server, MONDAY)
            await complete(server, TUESDAY)
            runs, answer = await tree_of(server)
            assert [run["parent"] for run in runs] == [-1, 0, 0]
            assert all(run["tokens"] % BLOCK_SIZE == 0 and run["users"] == 0 for run in runs)
            assert answer["tokens"] == sum(run["tokens"] for run in runs) == runs[0]["subtree_tokens"]
            assert runs[0]["text"].startswith("the quick") and runs[0]["state"] == "reused"
            assert len({run["text"] for run in runs}) == len({run["id"] for run in runs}) == 3
            assert len((await tree_of(server, query="?max_runs=1"))[0]) == 1
            assert (await server.client.post("/reset_prefix_cache")).status_code == 200
            async with asyncio.timeout(60):  # the server hears of it with the engine's next statistics
                while (await tree_of(server))[0]:
                    await asyncio.sleep(0.02)

    asyncio.run(run())


def test_a_pinned_prefix_is_marked(folder: str) -> None:
    async def run() -> None:
        async with inside(folder, build_checked) as server:
            assert (await server.client.post("/v1/prefixes", json={"name": "p", "text": WORDS})).status_code == 201
            await complete(server, MONDAY)
            runs, _ = await tree_of(server)
            assert runs[0]["pinned"] and not runs[-1]["pinned"]

    asyncio.run(run())


def test_a_tenant_sees_its_own_blocks_and_figures_and_an_administrator_all(folder: str) -> None:
    async def run() -> None:
        async with inside(folder, build_checked, **KEYS) as server:
            await complete(server, MONDAY, "key-a")
            await complete(server, TUESDAY, "key-a")
            own, _ = await tree_of(server, "key-a")
            assert own and (await tree_of(server, "key-b"))[0] == []
            await complete(server, MONDAY, "key-b")
            other, _ = await tree_of(server, "key-b")
            everything, _ = await tree_of(server, "root")
            assert {run["id"] for run in own}.isdisjoint(run["id"] for run in other)
            assert len({run["tenant"] for run in everything}) == 2
            assert {run["tenant"] for run in own}.isdisjoint(run["tenant"] for run in other)
            mine, theirs, all_of_it = [await frame_of(server, key) for key in ("key-a", "key-b", "root")]
            assert sum(all_of_it["sources"].values()) == sum(mine["sources"].values()) + sum(theirs["sources"].values())
            assert mine["sources"]["shared"] and not theirs["sources"]["shared"]
            assert "running" in all_of_it and not {"running", "num_steps", "kv_tokens", "ttft_ms"} & mine.keys()
            for path in DATA:
                assert (await server.client.get(path)).status_code == 401

    asyncio.run(run())


def test_without_keys_the_data_is_for_callers_on_this_machine_and_the_page_for_all(folder: str) -> None:
    async def run() -> None:
        async with inside(folder, build_checked) as server:
            for path in DATA:
                assert (await server.client.get(path)).status_code == 200
                for headers in ({"x-forwarded-for": "10.0.0.1"}, {"origin": "https://evil.example"}):
                    found = await server.client.get(path, headers=headers)
                    assert (found.status_code, found.json()["error"]["code"]) == (403, "permission_denied"), path
            for path in ("/", "/page/page.js"):
                assert (await server.client.get(path, headers={"x-forwarded-for": "10.0.0.1"})).status_code == 200

    asyncio.run(run())


def test_a_rebound_name_reads_neither_page_nor_data(folder: str) -> None:
    async def run() -> None:
        async with inside(folder, build_checked) as server:
            for path in ("/", "/page/page.js", *DATA):
                found = await server.client.get(path, headers={"host": "evil.example"})
                assert (found.status_code, found.json()["error"]["code"]) == (403, "host_not_allowed"), path

    asyncio.run(run())


def test_what_is_out_of_bounds_is_refused(folder: str) -> None:
    async def run() -> None:
        async with inside(folder, build_checked) as server:
            bad = ("0", "-1", "x", "10001", "9" * 30, "", "\u0663")
            for path, name in (("/v1/cache/tree", "max_runs"), ("/v1/cache/live", "frames")):
                for value in bad if name == "max_runs" else (*bad[:3], "9" * 30):
                    found = await server.client.get(path, params={name: value})
                    assert (found.status_code, found.json()["error"]["param"]) == (400, name), value

    asyncio.run(run())


def test_streams_end_with_their_clients_and_are_bounded_per_tenant(folder: str) -> None:
    async def run() -> None:
        async with inside(folder, build_checked) as server:
            app = server.client._transport.app  # type: ignore[attr-defined]
            gone = asyncio.Event()

            async def receive() -> dict[str, object]:
                await gone.wait()
                return {"type": "http.disconnect"}

            async def send(message: Any) -> None:
                started.append(message["type"])

            scope = {"type": "http", "method": "GET", "path": "/v1/cache/live", "raw_path": b"", "query_string": b""}
            scope |= {"headers": [(b"host", b"localhost")], "client": ("127.0.0.1", 1)}
            started: list[str] = []
            streams = [asyncio.create_task(app(dict(scope), receive, send)) for _ in range(MAX_STREAMS_PER_TENANT)]
            await until(lambda: started.count("http.response.body") >= MAX_STREAMS_PER_TENANT)
            found = await server.client.get("/v1/cache/live?frames=1")
            assert (found.status_code, found.json()["error"]["code"]) == (429, "too_many_streams")
            gone.set()
            await asyncio.gather(*streams)
            assert (await server.client.get("/v1/cache/live?frames=1")).status_code == 200

    asyncio.run(run())


def test_the_page_loads_nothing_from_elsewhere_and_says_so(folder: str) -> None:
    async def run() -> None:
        async with inside(folder, build_checked, root_path="/llm", **KEYS) as server:
            page = await server.client.get("/")
            policy = dict(rule.strip().split(" ", 1) for rule in page.headers["content-security-policy"].split(";"))
            assert policy.pop("default-src") == policy.pop("base-uri") == policy.pop("frame-ancestors") == "'none'"
            assert policy.pop("form-action") == "'none'" and set(policy.values()) == {"'self'"}
            assert page.headers["x-content-type-options"] == "nosniff"
            files = [name.split('"')[0] for name in page.text.split('="page/')[1:]]
            assert files and "http" not in page.text.replace("http-equiv", "") and " style=" not in page.text
            for name in files:
                found = await server.client.get(f"/llm/page/{name}")
                assert found.status_code == 200 and found.headers["content-security-policy"]
                again = await server.client.get(f"/page/{name}", headers={"if-none-match": found.headers["etag"]})
                assert (again.status_code, again.content) == (304, b"")
            assert (await server.client.get("/page/nothing.js")).status_code == 404
            assert (await server.client.get("/page/..%2fprefix_tree.py")).status_code == 404

    asyncio.run(run())


def test_no_page_turns_it_off(folder: str) -> None:
    async def run() -> None:
        async with inside(folder, build_checked, page=False) as server:
            found: list[httpx.Response] = [await server.client.get(path) for path in ("/", "/page/page.js", *DATA)]
            assert [answer.status_code for answer in found] == [404, 404, 200, 200]

    asyncio.run(run())


def test_losses_name_their_cause_and_its_remedy(folder: str) -> None:
    async def run() -> None:
        async with inside(folder, build_checked) as server:
            await complete(server, MONDAY)
            frame = await frame_of(server)
            assert [loss["cause"] for loss in frame["losses"]] == ["new"] and frame["losses"][0]["remedy"]
            assert frame["losses"][0]["tokens"] == frame["sources"]["computed"]
            assert frame["hit_rate"] == 0 and frame["running"] == frame["waiting"] == 0

    asyncio.run(run())


def test_a_timestamp_at_the_front_of_chats_is_named_with_the_doctors_remedy(folder: str) -> None:
    async def run() -> None:
        async with inside(folder, build_checked, doctor_share=1.0, **KEYS) as server:
            doctor = server.state.loaded_model.doctor
            for number in range(1, 4):
                system = f"Now it is 2026-11-26 10:0{number}:11.\n{WORDS}{WORDS}"
                messages = [{"role": "system", "content": system}, {"role": "user", "content": "Well?"}]
                body = {"messages": messages, "max_tokens": 1}
                found = await server.client.post("/v1/chat/completions", json=body, headers=bearer("key-a"))
                assert found.status_code == 200, found.text
                await until(lambda: not doctor.is_busy)
            everything, own, other = [await frame_of(server, key) for key in ("root", "key-a", "key-b")]
            for frame in (everything, own):
                causes = {loss["cause"]: loss for loss in frame["losses"]}
                assert "move it behind the constant text" in causes["timestamp"]["remedy"]
                assert 0 < causes["timestamp"]["tokens"] <= frame["sources"]["computed"]
            assert other["losses"] == []
            assert [row["cause"] for row in everything["tenants"]] == ["timestamp"]

    asyncio.run(run())


def test_an_administrator_sees_which_tenant_loses_what_and_who_holds_the_pool(folder: str) -> None:
    async def run() -> None:
        async with inside(folder, build_checked, **KEYS) as server:
            for prompt in (MONDAY, [1] * 250, [2] * 100):  # more than its share, so that others evict it
                await complete(server, prompt, "key-a")
            for number in range(3, 11):
                await complete(server, [number] * 250, "key-b")
            await complete(server, MONDAY, "key-a")
            tree, frame = (await tree_of(server, "root"))[1], await frame_of(server, "root")
            own = (await tree_of(server, "key-a"))[1]
            other, loser = frame["tenants"]  # the most computed tokens first
            assert own["tenants"] == {loser["tenant"]: own["tokens"]}
            assert tree["tenants"] == {**own["tenants"], other["tenant"]: tree["tokens"] - own["tokens"]}
            assert loser["evicted_tokens"] > 0 == other["evicted_tokens"] and loser["cause"] == "evicted"
            assert loser["evicted_by"] == {other["tenant"]: loser["evicted_tokens"]}
            computed = sum(row["prompt_tokens"] - row["cached_tokens"] for row in frame["tenants"])
            assert computed == frame["sources"]["computed"]
            mine = await frame_of(server, "key-a")
            (loss,) = [loss for loss in mine["losses"] if loss["cause"] == "evicted"]
            assert loss["by"] == {"another tenant": loss["tokens"]} and loss["tokens"] == loser["evicted_tokens"]
            assert "tenants" not in mine and other["tenant"] not in str(mine)

    asyncio.run(run())


def test_what_the_doctor_examined_is_scaled_to_no_more_than_was_computed_in_the_window(folder: str) -> None:
    """Examined: a prompt of 100 tokens, 90 of them avoidable; computed beside it: none of 10,000 reused tokens."""

    async def run() -> None:
        async with inside(folder, build_checked, **KEYS) as server:
            await complete(server, MONDAY, "key-a")
            for _ in range(9):
                await complete(server, MONDAY, "key-a")
            counts = AvoidableCounts(1, 100, 100, 90, Counter(timestamp=90))
            doctor = server.state.loaded_model.doctor
            doctor.counts, doctor.tenants = counts, {name: counts for name in server.state.loaded_model.metrics.tenants}
            for key in ("root", "key-a"):
                frame = await frame_of(server, key)
                (loss,) = [loss for loss in frame["losses"] if loss["cause"] == "timestamp"]
                assert loss["tokens"] == round(0.9 * frame["sources"]["computed"])

    asyncio.run(run())


def test_an_open_stream_does_not_keep_a_server_from_stopping(folder: str, tmp_path: Path) -> None:
    with fake_server(folder, tmp_path / "log") as server, server.client() as client:
        with client.stream("GET", "/v1/cache/live") as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            server.process.send_signal(signal.SIGTERM)
            assert "event: error" in list(lines)
        assert server.wait() == 0


def tree_reader(server: Any) -> Callable[..., Awaitable[dict[str, Any]]]:
    """Return what reads the tree of this server as an administrator, at most so many runs."""
    tree = cache_tree.CacheTreeSnapshot(server.engine)
    return lambda most=100: tree.tree_json(server.state.loaded_model, Principal(is_admin=True), most)


def test_callers_of_an_unchanged_tree_share_its_rows_and_learn_that_it_holds(folder: str) -> None:
    async def run() -> None:
        async with inside(folder, build_checked) as server:
            await complete(server, MONDAY)
            read, stats = tree_reader(server), server.engine.stats
            first, again = await read(), await read()
            assert first["runs"] and (server.engine.stats != stats or again["runs"] is first["runs"])
            await complete(server, TUESDAY)
            await until(lambda: server.engine.stats != stats)
            later = await read()
            assert later["tokens"] > first["tokens"] and later["runs"] is not first["runs"]
            fewer = await read(1)
            assert len(json.loads(bytes(fewer["runs"]))) == 1 < len(json.loads(bytes(later["runs"])))

    asyncio.run(run())


def test_the_longer_a_tree_took_the_longer_it_is_shown(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with inside(folder, build_checked) as server:
            await complete(server, MONDAY)
            monkeypatch.setattr(cache_tree, "SERVER_SHARE", 1e-9)  # a microsecond is a quarter of an hour
            read, stats = tree_reader(server), server.engine.stats
            first = await read()
            await complete(server, TUESDAY)
            await until(lambda: server.engine.stats != stats)
            assert (await read())["runs"] is first["runs"]

    asyncio.run(run())
