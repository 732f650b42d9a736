"""Everything on, over HTTP, by the hundred: tenants, pins, aborts, a small pool; tokens are those without a cache."""

import asyncio
import sys
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import httpx
import pytest
from server.harness import Server, spawn

from headstart import LLM

VOCAB = 1500  # of the bundled model
REQUESTS = 400
TABLES = '[[tenant]]\nname = "a"\napi_keys = ["a1", "a2"]\n[[tenant]]\nname = "b"\napi_keys = ["b1"]\n'
FLAGS = (
    *("--port", "0", "--dtype", "float32", "--num-blocks", "160", "--max-num-batched-tokens", "160"),
    *("--max-num-seqs", "24", "--page-aligned-scheduling", "--page-charge", "ceil"),
    *("--long-prefill-token-threshold", "64", "--admin-api-key", "root", "--no-access-log"),
)


class Job(NamedTuple):
    prompt: list[int]
    max_tokens: int
    key: str
    cache: str
    hangs_up: bool


def make_jobs(rng: Random) -> tuple[list[list[int]], list[Job]]:
    """Long stems, and prompts cut from them with tails of their own."""
    stems = [[rng.randrange(5, VOCAB) for _ in range(rng.randint(150, 600))] for _ in range(5)]
    jobs: list[Job] = []
    for _ in range(REQUESTS):
        stem = rng.choice(stems)
        cut = rng.choice([100, 160, len(stem), len(stem), len(stem) - 7])
        tail = [rng.randrange(5, VOCAB) for _ in range(rng.choice([0, 1, 15, 16, 17, 40]))]
        mode = rng.choice(["read-write"] * 6 + ["read-only", "bypass"])
        key = rng.choice(["a1", "a2", "b1"])
        jobs.append(Job(stem[:cut] + tail, rng.choice([1, 8, 24]), key, mode, rng.random() < 0.15))
    return stems, jobs


async def ask(server: Server, stems: list[list[int]], jobs: list[Job], rng: Random) -> tuple[list[Any], Any]:
    """The answers, None for those who hung up, and the statistics when all is quiet."""
    seats, root = asyncio.Semaphore(48), {"authorization": "Bearer root"}
    pauses = [rng.random() / 5 for _ in jobs]

    async def one(job: Job, pause: float) -> Any:
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
        for name, tokens, tenant in (("public", stems[0][:128], ""), ("own", stems[1][:140], "a")):
            pin = {"name": name, "token_ids": tokens, "tenant": tenant}
            assert (await client.post("/v1/prefixes", headers=root, json=pin)).status_code == 201
        answers = await asyncio.gather(*map(one, jobs, pauses))
        async with asyncio.timeout(60):
            while True:
                stats = (await client.get("/v1/cache/stats", headers=root)).json()
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
    llm = LLM("", dtype="float32", enable_prefix_caching=False)
    compared = 0
    for max_tokens in (1, 8, 24):
        asked = [(job, answer) for job, answer in zip(jobs, answers, strict=True) if answer and job[1] == max_tokens]
        sampling = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        plain = llm.generate([job.prompt for job, _ in asked], sampling, progress=False)
        for (job, answer), due in zip(asked, plain, strict=True):
            assert answer["choices"][0]["token_ids"] == due.token_ids, (job.key, job.cache, len(job.prompt))
            compared += 1
    assert compared > REQUESTS * 0.7
