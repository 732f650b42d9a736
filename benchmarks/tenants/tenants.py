"""Latency of one tenant alone and beside another with many connections: tenants.py MODEL [FLAG...] > result.json.

A real server with two keys. One tenant sends chats one after the other; the other keeps 0, 12 and 300 connections busy.
By turns, so that each round has all three. Not valid if a request of the single tenant is refused or fails. Needs a
quiet machine; the clients' own CPU use is reported, since they share it.
"""

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import httpx

from headstart.measurement.machine import describe_machine
from headstart_lab.runners.served_replica import Launch, replica

CONNECTIONS = (0, 12, 300)
ROUNDS, REQUESTS = 5, 20  # of the single tenant in each turn
PROMPT_WORDS, OUTPUT = 80, 32
HOG_WORDS, HOG_OUTPUT = (40, 300), 64
SETTLE_SECONDS = 5.0  # of the other tenant alone, before a turn
LIMIT_SECONDS = 600.0  # of a turn
WORDS = ("river", "engine", "ledger", "window", "harbour", "ticket", "garden", "printer", "valley", "signal")
ONE, HOG = "key-of-one-tenant", "key-of-the-other"


async def ask(client: httpx.AsyncClient, key: str, words: int, output: int, rng: Random) -> int:
    body = {
        "messages": [{"role": "user", "content": " ".join(rng.choices(WORDS, k=words))}],
        "max_tokens": output,
        "temperature": 0,
        "ignore_eos": True,
    }
    response = await client.post("/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"})
    return response.status_code


async def turn(url: str, num_connections: int, seed: int) -> dict[str, Any]:
    """Return the seconds of each request of the single tenant, and the statuses of both."""
    rng, statuses, times = Random(seed), {"one": Counter[int](), "hog": Counter[int]()}, list[float]()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=LIMIT_SECONDS, limits=limits) as client:

        async def hog(number: int) -> None:
            own = Random(f"{seed}/{number}")
            while True:
                status = await ask(client, HOG, own.randint(*HOG_WORDS), HOG_OUTPUT, own)
                statuses["hog"][status] += 1
                if status == 429:
                    await asyncio.sleep(0.2)

        tasks = [asyncio.create_task(hog(number)) for number in range(num_connections)]
        try:
            async with asyncio.timeout(LIMIT_SECONDS):
                await asyncio.sleep(SETTLE_SECONDS if tasks else 0)
                for _ in range(REQUESTS):
                    began = time.perf_counter()
                    statuses["one"][await ask(client, ONE, PROMPT_WORDS, OUTPUT, rng)] += 1
                    times.append(time.perf_counter() - began)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(1.0)  # the server notes that they are gone
    return {"seconds": times, "statuses": {name: dict(counts) for name, counts in statuses.items()}}


def main(model: str, flags: tuple[str, ...]) -> int:
    turns: dict[int, list[dict[str, Any]]] = {number: [] for number in CONNECTIONS}
    cpu_began, began = time.process_time(), time.perf_counter()
    with (
        tempfile.TemporaryDirectory() as folder,
        replica(Launch(model, Path(folder), flags, (ONE, HOG)), None) as server,
    ):
        for round_number in range(ROUNDS):
            for number in CONNECTIONS:
                turns[number].append(asyncio.run(turn(server.url, number, 100 * round_number + number)))
                print(f"round {round_number}, {number} connections", file=sys.stderr, flush=True)
    alone = statistics.median(second for each in turns[0] for second in each["seconds"])
    rows: dict[str, dict[str, Any]] = {}
    for number, found in turns.items():
        medians = [statistics.median(each["seconds"]) for each in found]
        rows[str(number)] = {
            "p50_s": statistics.median(second for each in found for second in each["seconds"]),
            "p50_s_of_rounds": [min(medians), max(medians)],
            "over_alone": statistics.median(second for each in found for second in each["seconds"]) / alone,
            "refused_or_failed": sum(
                count for each in found for status, count in each["statuses"]["one"].items() if status != 200
            ),
            "other_tenants_statuses": dict(sum((Counter(each["statuses"]["hog"]) for each in found), Counter[int]())),
        }
    valid = all(row["over_alone"] <= 3 and not row["refused_or_failed"] for row in rows.values())
    result = {
        "command": " ".join(sys.argv),
        "machine": describe_machine(),
        "client_cpu_share": (time.process_time() - cpu_began) / (time.perf_counter() - began),
        "connections": rows,
        "turns": {str(number): found for number, found in turns.items()},
        "valid": valid,
    }
    print(json.dumps(result))
    return 0 if valid else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], tuple(sys.argv[2:])))
