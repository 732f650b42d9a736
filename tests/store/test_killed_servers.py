"""kill -9 of real servers under load: at most the last second of what they had computed is computed again.

Prompts of random tokens arrive without a pause while a thread notes the server's own count of computed prompt tokens.
At a random moment server and engine are killed, often in the middle of a prompt; the next server is asked for the same
prompts: its answers are those of a server without a store, and what it has of them is compared with that count. A stop
by SIGTERM loses nothing.
"""

import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import httpx
import pytest
from redis_server import RedisServer, secret_file
from server import patient
from server.harness import Server, spawn

from headstart.model.weights.init_model import write_random_model

DEATHS = 12
CONNECTIONS = 2
BLOCK = 16
BLOCKS = 120  # of a prompt, behind which is one more token
FLAGS = ("--port", "0", "--num-blocks", "8192", "--max-model-len", "4096", "--no-access-log", "--max-step-time", "0")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(
        "tiny", tmp_path_factory.mktemp("model") / "tiny", std=0.2, dtype="float32", progress=False
    )


def prompt(number: int) -> list[int]:
    rng = random.Random(number)
    return [rng.randrange(5, 500) for _ in range(BLOCKS * BLOCK + 1)]


def ask(server: Server, number: int) -> tuple[int, str]:
    """Ask for a prompt; return how many of its tokens the server had, and the answer."""
    body = {"prompt": prompt(number), "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    answer = server.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    return found["usage"]["prompt_tokens_details"]["cached_tokens"], found["choices"][0]["text"]


@dataclass
class Load:
    """Prompts without a pause, and what the server had computed when; until the server is no more."""

    server: Server
    first: int  # number of the first prompt
    asked: list[int] = field(default_factory=list)
    answered: list[int] = field(default_factory=list)
    samples: list[tuple[float, int]] = field(default_factory=list)  # (time, tokens computed at that time or before)
    is_over: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        asks = [threading.Thread(target=self._ask, args=(number,)) for number in range(CONNECTIONS)]
        self._threads = [*asks, threading.Thread(target=self._watch)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self.is_over.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, number: int) -> None:
        number += self.first
        try:
            while not self.is_over.is_set():
                self.asked.append(number)
                ask(self.server, number)
                self.answered.append(number)
                number += CONNECTIONS
        except (httpx.TransportError, AssertionError):
            is_over = self.is_over.wait(60)  # first: the thread that kills waits for the same process
            assert is_over or self.server.process.poll() is not None, "it failed before its end"

    def _watch(self) -> None:
        try:
            with self.server.client() as client:
                while not self.is_over.is_set():
                    tokens = client.get("/v1/cache/stats").json()["prefill_tokens"]
                    self.samples.append((time.monotonic(), tokens))
                    self.is_over.wait(0.01)
        except (httpx.TransportError, KeyError):  # the front may answer without its engine for a moment
            return


@dataclass
class Death:
    """`lost`: tokens in whole blocks that had been computed and were computed again; `seconds`: how old they were."""

    computed: int
    lost: int
    seconds: float


def examine(server: Server, plain: Server, load: Load, killed_at: float, already: int) -> Death:
    """Ask the next server for all prompts; `already`: what the one before had computed when the load began.

    `plain` has no store, and computes every prompt.
    """
    found = [ask(server, number) for number in load.asked]
    assert [text for _, text in found] == [ask(plain, number)[1] for number in load.asked]
    kept = sum(cached for cached, _ in found)
    partial = len(load.asked) + CONNECTIONS * (BLOCK - 1)  # tokens in no whole block
    samples = [(at, tokens - already - partial) for at, tokens in load.samples if at <= killed_at]
    there_at = max((at for at, tokens in samples if tokens <= kept), default=samples[0][0])
    return Death(samples[-1][1], max(samples[-1][1] - kept, 0), killed_at - there_at)


@pytest.fixture(scope="module")
def plain(model: Path) -> Iterator[Server]:
    with spawn([*patient.COMMAND, "serve", str(model), *FLAGS, "--no-enable-prefix-caching"], model / "log") as server:
        yield server.wait_ready()


@pytest.fixture(params=["folder", "server", "both"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "folder":
        yield str(tmp_path / "kv")
        return
    pytest.importorskip("redis")
    redis_server = RedisServer(tmp_path / "redis")
    yield redis_server.url if request.param == "server" else f"{tmp_path / 'kv'},{redis_server.url}"
    redis_server.kill()


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_killed_server_loses_at_most_the_last_second_and_a_stopped_one_nothing(
    model: Path, tmp_path: Path, place: str, plain: Server
) -> None:
    rng, deaths, load = random.Random(place[:5]), list[Death](), None
    store = ["--kv-store", place, "--kv-store-secret", str(secret_file(tmp_path))]
    killed_at, already = 0.0, 0
    for number in range(DEATHS + 2):
        with ExitStack() as stack:
            command = [*patient.COMMAND, "serve", str(model), *FLAGS, *store]
            server = stack.enter_context(spawn(command, tmp_path / f"log{number}")).wait_ready()
            if load is not None and number <= DEATHS:
                deaths.append(examine(server, plain, load, killed_at, already))
                print(f"\n{deaths[-1]}", end="")
            elif load is not None:
                assert load.answered and [ask(server, one)[0] for one in load.answered] == [
                    BLOCKS * BLOCK for _ in load.answered
                ]
                break
            already = server.get("/v1/cache/stats").json()["prefill_tokens"]
            load = Load(server, number * 100_000)
            time.sleep(rng.uniform(1.5, 4.0))
            if number < DEATHS:
                killed_at = time.monotonic()
                server.kill()
            else:
                assert server.stop(signal.SIGTERM) == 0
            load.end()
    seconds, computed = sorted(death.seconds for death in deaths), sum(death.computed for death in deaths)
    print(f"\n{place.split(':')[0]}: {computed:,} tokens computed, {sum(death.lost for death in deaths):,} lost")
    print(f"age of the oldest lost, s: {median(seconds):.2f} in the middle, {seconds[-1]:.2f} at most")
    assert len(deaths) == DEATHS and seconds[-1] <= 1.0, deaths
