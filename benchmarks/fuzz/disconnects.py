"""1,500 requests whose clients disconnect within 3 s: disconnects.py [--checkout FOLDER] > result.json.

Reports how long /livez went unanswered (other work on the machine counts), and the CPU time of the server until the
last client had gone, and after it, in a row of rounds. Bodies of 0.4, 13 and 200 KB: there is work before the engine,
too. `--checkout`: a server of another checkout, to compare.
"""

import argparse
import asyncio
import contextlib
import json
import os
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import psutil

from headstart.measurement.machine import describe_machine
from headstart_lab.fuzz.fuzz import Silence, start

REQUESTS, SECONDS, ROUNDS = 1500, 3.0, 3
WORDS = ("river", "engine", "ledger", "window", "harbour", "ticket", "garden", "printer", "valley", "signal")
IDLE = 0.1  # CPU seconds in half a second of a server that is asked for /livez 50 times a second


async def cut(session: aiohttp.ClientSession, url: str, rng: Random) -> None:
    """Send one request at a random time, and disconnect at a later one."""
    began, ended = sorted((rng.uniform(0, SECONDS), rng.uniform(0, SECONDS)))
    await asyncio.sleep(began)
    content = " ".join(rng.choices(WORDS, k=rng.choice((60, 2_000, 30_000))))
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 64, "stream": rng.random() < 0.5}
    with contextlib.suppress(TimeoutError, aiohttp.ClientError):
        async with asyncio.timeout(ended - began):
            async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
                await answer.read()


async def burst(url: str, seed: int) -> None:
    """Send all requests of a round."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as session:
        await asyncio.gather(*(cut(session, url, Random(f"{seed} {number}")) for number in range(REQUESTS)))


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and of all its children so far."""
    root = psutil.Process(pid)
    times = [process.cpu_times() for process in (root, *root.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def settled(pid: int) -> float:
    """Wait until the server uses little more than it does when idle, and return its CPU time."""
    before = -IDLE
    while (now := cpu_seconds(pid)) - before >= IDLE:
        before = now
        time.sleep(0.5)
    return now


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path)
    checkout = parser.parse_args().checkout
    if checkout is not None:
        os.environ["PYTHONPATH"] = str(checkout.resolve() / "src")
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        process, url = start(["--no-access-log"], Path(folder) / "log")
        silence = Silence(url)
        silence.start()
        try:
            for number in range(ROUNDS):
                silence.reset()
                before = settled(process.pid)
                asyncio.run(burst(url, number))
                gone = cpu_seconds(process.pid)
                after = settled(process.pid) - gone
                figures = {"livez_silent_s": silence.longest, "cpu_s": gone - before, "cpu_after_s": after}
                rounds.append({name: round(value, 2) for name, value in figures.items()})
        finally:
            silence.stop()
            process.terminate()
            process.wait(60)
    print(
        json.dumps(
            {"machine": describe_machine(), "requests": REQUESTS, "seconds": SECONDS, "rounds": rounds}, default=float
        )
    )


if __name__ == "__main__":
    main()
