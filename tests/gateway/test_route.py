"""`headstart route` as its users run it: a process, real servers behind it, the real openai client before it."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest
from gateway.harness import unused_url
from server.fake_engine import Gate
from server.harness import PATIENCE, Server, address_of, fake_command, fake_server, spawn, wait_for

from headstart.config.options import RouterOptions
from headstart.core.errors import ConfigError
from headstart.gateway.run_gateway import discovery_from_options


@contextmanager
def routing(log_path: Path, *urls: str, flags: tuple[str, ...] = ()) -> Iterator[Server]:
    """A `headstart route` that listens."""
    named = [part for url in urls for part in ("--replica", url)]
    command = [sys.executable, "-m", "headstart", "route", "--port", "0", "--health-interval", "0.1", *named, *flags]
    with spawn(command, log_path) as server:
        yield server.wait_ready()


@pytest.fixture(scope="module")
def fleet(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server, Server]]:
    room = tmp_path_factory.mktemp("fleet")
    with (
        fake_server(folder, room / "one") as one,
        fake_server(folder, room / "other") as other,
        routing(room / "route", one.url, other.url, flags=("--decision-log", str(room / "decisions"))) as router,
    ):
        wait_for(lambda: len([r for r in router.get("/v1/fleet").json()["replicas"] if r["state"] == "up"]) == 2)
        yield router, one, other


def test_the_openai_client_sees_one_server(fleet: tuple[Server, Server, Server]) -> None:
    router, one, other = fleet
    client = openai.OpenAI(base_url=router.url + "/v1", api_key="none", timeout=PATIENCE, max_retries=0)
    model = client.models.list().data[0].id
    prompt = list(range(1, 100))
    first = client.completions.create(model=model, prompt=prompt, max_tokens=4)
    again = client.completions.create(model=model, prompt=prompt, max_tokens=4)
    assert first.usage and again.usage and again.usage.prompt_tokens_details
    assert again.usage.prompt_tokens_details.cached_tokens == 96, "the second goes where the first was"
    chunks = list(client.completions.create(model=model, prompt=prompt, max_tokens=4, stream=True))
    assert "".join(c.choices[0].text for c in chunks) == again.choices[0].text
    told = client.completions.create(
        model=model, prompt=prompt, max_tokens=4, stream=True, stream_options={"include_usage": True}
    )
    assert list(told)[-1].usage is not None
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt=prompt)
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=model, prompt=prompt, temperature=9)
    served = [server.metric("vllm:request_success_total") for server in (one, other)]
    assert sorted(served)[0] == 0 and sorted(served)[1] == 4
    assert router.metric("headstart:router_prediction_error_tokens_total") == 0


def test_what_it_says_of_itself(fleet: tuple[Server, Server, Server]) -> None:
    router, one, other = fleet
    assert "serving" in router.log and "2 of 2 up" in router.log
    told = router.get("/v1/fleet").json()
    assert [replica["url"] for replica in told["replicas"]] == [one.url, other.url]
    assert {replica["engine"] for replica in told["replicas"]} == {"headstart"}
    assert {replica["cache"]["capacity"] for replica in told["replicas"]} == {1000}
    assert router.get("/version").status_code == 200


def test_replicas_that_load_are_said_to(folder: str, tmp_path: Path) -> None:
    with spawn(fake_command(f"{folder}?load=1000"), tmp_path / "one") as one:
        url = wait_for(lambda: address_of(one.process.pid))
        with routing(tmp_path / "route", url) as router:
            assert "  replicas 0 of 1 up (1 loading)" in router.log
            assert [replica["state"] for replica in router.get("/v1/fleet").json()["replicas"]] == ["loading"]
            answers = [router.get("/health"), router.post("/v1/completions", json={"prompt": [1]})]
            assert [answer.status_code for answer in answers] == [503, 503]
            assert all("loading" in answer.text for answer in answers), [answer.text for answer in answers]


def test_the_first_address_on_its_stderr_is_its_own(fleet: tuple[Server, Server, Server]) -> None:
    router, one, other = fleet
    addresses = re.findall(r"http://[^\s\"/]+", router.log)
    assert addresses[0] == router.url
    assert {one.url, other.url} <= set(addresses), "states of replicas are told behind the banner"


def test_its_decisions_are_on_disk(fleet: tuple[Server, Server, Server]) -> None:
    router, _, _ = fleet
    assert router.post("/v1/completions", json={"prompt": [7] * 40, "max_tokens": 2}).status_code == 200
    path = router.log_path.parent / "decisions"
    ours = wait_for(
        lambda: [line for line in map(json.loads, path.read_text().splitlines()) if line["prompt_tokens"] == 40]
    )
    assert ours[0]["ok"] and ours[0]["block_size"] == 16 and len(bytes.fromhex(ours[0]["names"])) == 2 * 8


def test_sigterm_answers_what_was_admitted_and_ends_with_0(folder: str, tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    with (
        fake_server(gate.holds(folder, 2), tmp_path / "one") as one,
        routing(tmp_path / "route", one.url) as router,
        router.client() as client,
    ):
        wait_for(lambda: router.get("/health").status_code == 200)
        body = {"prompt": [1, 2, 3], "max_tokens": 5, "stream": True, "ignore_eos": True}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            router.process.send_signal(signal.SIGTERM)
            wait_for(lambda: "SIGTERM" in router.log)
            gate.open()
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert router.wait() == 0


def test_ctrl_c_twice_stops_at_once(folder: str, tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    with (
        fake_server(gate.holds(folder, 2), tmp_path / "one") as one,
        routing(tmp_path / "route", one.url) as router,
        router.client() as client,
    ):
        wait_for(lambda: router.get("/health").status_code == 200)
        body = {"prompt": [1, 2, 3], "max_tokens": 50, "stream": True, "ignore_eos": True}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()  # kept: a generator that is dropped closes the connection
            next(lines)
            router.process.send_signal(signal.SIGINT)
            wait_for(lambda: "again stops at once" in router.log)
            router.process.send_signal(signal.SIGINT)
            assert router.wait() == 130


def test_replicas_may_come_after_the_router(folder: str, tmp_path: Path) -> None:
    list_path = tmp_path / "replicas"
    list_path.write_text("# none yet\n")
    flags = ("--discover", f"file:{list_path}")
    with routing(tmp_path / "route", flags=flags) as router:
        assert router.post("/v1/completions", json={"prompt": [1]}).json()["error"]["code"] == "no_replicas"
        with fake_server(folder, tmp_path / "one") as one:
            list_path.write_text(one.url + "\n")
            wait_for(lambda: router.get("/health").status_code == 200)
            assert router.post("/v1/completions", json={"prompt": [1], "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize(
    ("flags", "reported"),
    [
        ((), "no replicas"),
        (("--replica", "nonsense://x"), "no address"),
        (("--replica", "http://a:1", "--discover", "file:x"), "not both"),
        (("--discover", "what"), "discover is"),
        (("--replica", "http://a:1", "--tokenizer", "/nowhere"), "no folder"),
        (("--replica", "http://a:1", "--shadow-policy", "best"), "no routing policy"),
        (("--replica", "http://a:1", "--decision-log", "/no/such/folder/log"), "decision log"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(flags: tuple[str, ...], reported: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "headstart", "route", "--port", "0", *flags]
    with spawn(command, tmp_path / "log") as router:
        assert router.wait() == 2
        assert reported in router.log and router.log.count("\n") == 1


def test_no_replica_given_is_a_mistake_of_the_options() -> None:
    with pytest.raises(ConfigError, match="headstart route --replica"):
        discovery_from_options(RouterOptions())
    assert discovery_from_options(RouterOptions(replica=(unused_url(),))).describe() == "1 replica"
    assert re.search("2 replicas", discovery_from_options(RouterOptions(replica=("a:1", "b:1", "a:1"))).describe())


def test_a_router_tokenizes_without_threads_of_the_library(tmp_path: Path) -> None:
    code = """
import os
from headstart.bundled import bundled_intent_model_folder
from headstart.config.options import RouterOptions, ServerOptions
from headstart.gateway.run_gateway import run_router
from headstart.openai.tokenizer.tokenizer import Tokenizer
assert run_router(RouterOptions(), ServerOptions()) == 2  # it has no replicas
before = len(os.listdir("/proc/self/task"))
Tokenizer.from_folder(bundled_intent_model_folder()).encode("the quick brown fox " * 1000)
assert len(os.listdir("/proc/self/task")) == before
"""
    environment = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, cwd=tmp_path)
