"""Everything on, over HTTP, by the hundred: tenants, pins, aborts, a small pool; tokens are those without a cache.

In a second form two replicas share a store, and are killed and restarted again and again.
"""

import asyncio
import sys
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import httpx
import pytest
from server.harness import Server, spawn

from headstart import LLM

VOCAB = 1500  # of the bundled model
ROOT = {"authorization": "Bearer root"}
REQUESTS, DEATHS = 400, 10
TABLES = '[[tenant]]\nname = "a"\napi_keys = ["a1", "a2"]\n[[tenant]]\nname = "b"\napi_keys = ["b1"]\n'
FLAGS = (
    *("--port", "0", "--dtype", "float32", "--num-blocks", "160", "--max-num-batched-tokens", "160"),
    *("--max-num-seqs", "24", "--page-aligned-scheduling", "--page-charge", "ceil"),
    *("--long-prefill-token-threshold", "64", "--admin-api-key", "root", "--no-access-log"),
)


class GenerationJob(NamedTuple):
    prompt: list[int]
    max_tokens: int
    key: str
    cache: str
    hangs_up: bool


def make_jobs(rng: Random) -> tuple[list[list[int]], list[GenerationJob]]:
    """Long stems, and prompts cut from them with tails of their own."""
    stems = [[rng.randrange(5, VOCAB) for _ in range(rng.randint(150, 600))] for _ in range(5)]
    jobs: list[GenerationJob] = []
    for _ in range(REQUESTS):
        stem = rng.choice(stems)
        cut = rng.choice([100, 160, len(stem), len(stem), len(stem) - 7])
        tail = [rng.randrange(5, VOCAB) for _ in range(rng.choice([0, 1, 15, 16, 17, 40]))]
        mode = rng.choice(["read-write"] * 6 + ["read-only", "bypass"])
        key = rng.choice(["a1", "a2", "b1"])
        jobs.append(GenerationJob(stem[:cut] + tail, rng.choice([1, 8, 24]), key, mode, rng.random() < 0.15))
    return stems, jobs


def make_pins(stems: list[list[int]]) -> list[dict[str, Any]]:
    own = {"name": "own", "token_ids": stems[1][:140], "tenant": "a"}
    return [{"name": "public", "token_ids": stems[0][:128]}, own]


async def ask(server: Server, stems: list[list[int]], jobs: list[GenerationJob], rng: Random) -> tuple[list[Any], Any]:
    """The answers, None for those who hung up, and the statistics when all is quiet."""
    seats = asyncio.Semaphore(48)
    pauses = [rng.random() / 5 for _ in jobs]

    async def one(job: GenerationJob, pause: float) -> Any:
        async with seats:
            await asyncio.sleep(pause)
            body = {"prompt": job.prompt, "max_tokens": job.max_tokens, "cache": job.cache}
            body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
            headers = {"authorization": f"Bearer {job.key}"}
            try:
                async with asyncio.timeout(0.4 if job.hangs_up else 300):
                    return (await client.post("/v1/completions", headers=headers, json=body)).json()
            except TimeoutError:
                return None

    async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
        for pin in make_pins(stems):
            assert (await client.post("/v1/prefixes", headers=ROOT, json=pin)).status_code == 201
        answers = await asyncio.gather(*map(one, jobs, pauses))
        async with asyncio.timeout(60):
            while True:
                stats = (await client.get("/v1/cache/stats", headers=ROOT)).json()
                if not stats["requests"]["running"] + stats["requests"]["waiting"]:
                    return answers, stats
                await asyncio.sleep(0.1)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [1, 2])
def test_hundreds_of_requests_with_everything_on_get_the_tokens_of_an_engine_without_cache(
    seed: int, tmp_path: Path
) -> None:
    rng = Random(seed)
    stems, jobs = make_jobs(rng)
    (tmp_path / "headstart.toml").write_text(TABLES)
    command = [sys.executable, "-m", "headstart", "serve", "--config", str(tmp_path / "headstart.toml"), *FLAGS]
    with spawn(command, tmp_path / "log") as server:
        answers, stats = asyncio.run(ask(server.wait_ready(), stems, jobs, rng))
        assert server.stop() == 0
    assert stats["blocks"]["referenced"] == 0, "blocks leaked"
    tokens = stats["prompt_tokens"]
    assert tokens["pinned"] > 0 and tokens["followed"] > 0 and stats["evictions"]["capacity"] > 0
    assert tokens["cached"] + tokens["computed"] == tokens["total"]
    assert count_equal(jobs, answers) > REQUESTS * 0.7


def count_equal(jobs: list[GenerationJob], answers: list[Any]) -> int:
    """Compares every answer with an engine without a cache; how many there were."""
    llm = LLM("", dtype="float32", enable_prefix_caching=False)
    compared = 0
    for max_tokens in (1, 8, 24):
        asked = [(job, answer) for job, answer in zip(jobs, answers, strict=True) if answer and job[1] == max_tokens]
        sampling = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        plain = llm.generate([job.prompt for job, _ in asked], sampling, progress=False)
        for (job, answer), due in zip(asked, plain, strict=True):
            assert answer["choices"][0]["token_ids"] == due.token_ids, (job.key, job.cache, len(job.prompt))
            compared += 1
    return compared


class Replicas:
    """Servers on one folder. `restart` kills one; who asked it asks again."""

    def __init__(self, command: list[str], pins: list[dict[str, Any]], room: Path, stack: ExitStack) -> None:
        self._command, self._pins, self._room, self._stack = command, pins, room, stack
        self.num_starts = 0
        self.loaded_tokens = 0  # of those that are no more
        self.servers = [self.start(), self.start()]

    def start(self) -> Server:
        self.num_starts += 1
        server = self._stack.enter_context(spawn(self._command, self._room / f"log{self.num_starts}")).wait_ready()
        for pin in self._pins:
            assert httpx.post(f"{server.url}/v1/prefixes", headers=ROOT, json=pin, timeout=60).status_code == 201
        return server

    def restart(self, index: int) -> None:
        """kill -9, and a new server in its place."""
        server = self.servers[index]
        self.loaded_tokens += self.store_tokens(server)
        server.kill()
        self.servers[index] = self.start()

    def store_tokens(self, server: Server) -> int:
        answer = httpx.get(f"{server.url}/v1/cache/stats", headers=ROOT, timeout=30).json()
        return answer["prompt_tokens"]["store"]


async def ask_replicas(replicas: Replicas, jobs: list[GenerationJob], rng: Random) -> list[Any]:
    """The answers. The jobs come in waves, and in each of them one replica dies, now this one, now that."""

    async def one(job: GenerationJob, index: int) -> Any:
        body = {"prompt": job.prompt, "max_tokens": job.max_tokens, "cache": job.cache}
        body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
        headers = {"authorization": f"Bearer {job.key}"}
        for attempt in range(200):
            url = replicas.servers[(index + attempt) % 2].url
            try:
                answer = await client.post(f"{url}/v1/completions", headers=headers, json=body)
            except httpx.TransportError:
                await asyncio.sleep(0.1)
                continue
            if answer.status_code == 200:
                return answer.json()
            assert answer.status_code == 503, answer.text
            await asyncio.sleep(0.1)
        raise AssertionError("no replica ever answered")

    answers: list[Any] = []
    async with httpx.AsyncClient(timeout=300) as client:
        for number, start in enumerate(range(0, len(jobs), len(jobs) // DEATHS)):
            wave = [one(job, rng.randrange(2)) for job in jobs[start : start + len(jobs) // DEATHS]]
            asked = asyncio.gather(*wave)
            await asyncio.sleep(rng.uniform(0.05, 1.5))
            await asyncio.to_thread(replicas.restart, number % 2)
            answers += await asked
    return answers


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [3, 4])
def test_replicas_that_share_a_store_and_are_killed_and_restarted_get_nothing_wrong(seed: int, tmp_path: Path) -> None:
    rng = Random(seed)
    stems, jobs = make_jobs(rng)
    pins = make_pins(stems)
    (tmp_path / "headstart.toml").write_text(TABLES)
    command = [sys.executable, "-m", "headstart", "serve", "--config", str(tmp_path / "headstart.toml"), *FLAGS]
    command += ["--kv-store", str(tmp_path / "store"), "--kv-store-size", "64MiB"]  # so small that blocks are evicted
    with ExitStack() as stack:
        replicas = Replicas(command, pins, tmp_path, stack)
        answers = asyncio.run(ask_replicas(replicas, jobs, rng))
        loaded = replicas.loaded_tokens + sum(map(replicas.store_tokens, replicas.servers))
        assert [server.stop() for server in replicas.servers] == [0, 0]
    print(f"\nsoak: {replicas.num_starts - 2} deaths, {loaded} tokens loaded")
    assert replicas.num_starts == 2 + DEATHS and loaded > 5_000
    assert count_equal(jobs, answers) == len(jobs)
