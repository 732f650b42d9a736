"""`headstart route --envoy` as its users run it: a process, the real Envoy as its child, real servers behind it."""

import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import openai
import psutil
import pytest
from gateway.envoy_harness import envoy_binary, unused_port
from server.harness import PATIENCE, Server, fake_server, spawn, wait_for

from headstart.config.options import RouterOptions, ServerOptions
from headstart.core.errors import ConfigError
from headstart.gateway.picker import envoy_process
from headstart.gateway.picker.envoy_process import find_envoy
from headstart.gateway.picker.picker_fronts import StandalonePickerFront, make_envoy_fronts


def route_command(*words: str) -> list[str]:
    return [sys.executable, "-m", "headstart", "route", "--health-interval", "0.1", *words]


def child_of(router: Server) -> psutil.Process:
    """The Envoy of a router."""
    (child,) = psutil.Process(router.process.pid).children()
    assert "envoy" in child.name()
    return child


def is_over(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return True


def test_one_command_serves_the_openai_client_through_envoy(folder: str, tmp_path: Path) -> None:
    with fake_server(folder, tmp_path / "one") as one, fake_server(folder, tmp_path / "other") as other:
        words = ("--envoy", str(envoy_binary()), "--port", "0", "--replica", one.url, "--replica", other.url)
        with spawn(route_command(*words), tmp_path / "route") as router:
            router.wait_ready()
            wait_for(lambda: len([r for r in router.get("/v1/fleet").json()["replicas"] if r["state"] == "up"]) == 2)
            client = openai.OpenAI(base_url=router.url + "/v1", api_key="none", timeout=PATIENCE, max_retries=0)
            model = client.models.list().data[0].id
            prompt = list(range(1, 100))
            for stream in (False, True):
                answer = client.completions.create(model=model, prompt=prompt, max_tokens=4, stream=stream)
                list(answer)
            served = [server.metric("vllm:request_success_total") for server in (one, other)]
            assert sorted(served) == [0, 2]
            wait_for(lambda: router.metric("headstart:router_reports_total") == 2)
            assert router.metric("headstart:router_prediction_error_tokens_total") == 0
            response = client.responses.create(model=model, input="Hello", max_output_tokens=3)
            again = client.responses.create(model=model, input="more", previous_response_id=response.id)
            assert again.previous_response_id == response.id
            envoy = child_of(router)
            assert router.stop() == 0
            assert is_over(envoy)


def test_envoy_ends_with_a_killed_router_and_the_router_with_a_killed_envoy(folder: str, tmp_path: Path) -> None:
    with fake_server(folder, tmp_path / "one") as one:
        words = ("--envoy", str(envoy_binary()), "--port", "0", "--replica", one.url)
        with spawn(route_command(*words), tmp_path / "killed") as router:
            envoy = child_of(router.wait_ready())
            router.process.kill()
            wait_for(lambda: is_over(envoy))
        with spawn(route_command(*words), tmp_path / "alone") as router:
            child_of(router.wait_ready()).kill()
            assert router.wait() == 1
            assert "Envoy ended with code -9" in router.log


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--envoy", "/nowhere/envoy"), "there is no program"),
        (("--envoy", "external", "--port", "9"), "needs --envoy-folder"),
        (("--ext-proc", "9002"), "is no address"),
        (("--envoy", sys.executable), "Envoy does not start"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(words: tuple[str, ...], complaint: str, tmp_path: Path) -> None:
    command = route_command("--port", str(unused_port()), "--replica", "http://127.0.0.1:9", *words)
    with spawn(command, tmp_path / "route") as router:
        assert router.wait() == 2
        assert complaint in router.log and "Traceback" not in router.log


def test_an_address_in_use_is_reported(folder: str, tmp_path: Path) -> None:
    with fake_server(folder, tmp_path / "one") as one:
        words = ("--port", one.url.rpartition(":")[2], "--replica", one.url, "--envoy", str(envoy_binary()))
        with spawn(route_command(*words), tmp_path / "route") as router:
            assert router.wait() == 2 and "is in use" in router.log


def test_envoy_is_looked_for_in_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="pip install"):
        find_envoy("auto")
    (tmp_path / "envoy").touch(mode=0o755)
    assert find_envoy("auto") == tmp_path / "envoy"


def test_a_router_with_keys_has_no_route_to_a_replica_without_its_picker(tmp_path: Path) -> None:
    for given, is_open in (({}, True), ({"api_key": ("k",)}, False)):
        router = RouterOptions(envoy="external", envoy_folder=str(tmp_path))
        (front,) = make_envoy_fronts(router, ServerOptions(port=unused_port(), **given))
        assert front.url
        document = json.loads((tmp_path / "envoy.json").read_text())
        manager = document["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
        routes = manager["route_config"]["virtual_hosts"][0]["routes"]
        assert [route["match"] == {"prefix": "/"} for route in routes if "route" in route] == [is_open]
        assert oct(os.stat(tmp_path).st_mode)[-1] in "05"
    assert isinstance(
        make_envoy_fronts(RouterOptions(ext_proc="127.0.0.1:0"), ServerOptions())[0], StandalonePickerFront
    )


def test_sigterm_lets_a_request_in_envoy_finish(folder: str, tmp_path: Path) -> None:
    with fake_server(folder, tmp_path / "one") as one:
        words = ("--envoy", str(envoy_binary()), "--port", "0", "--replica", one.url)
        with spawn(route_command(*words), tmp_path / "route") as router:
            router.wait_ready()
            with router.client().stream(
                "POST", "/v1/completions", json={"prompt": [1, 2, 3], "max_tokens": 400, "stream": True}
            ) as response:
                pieces = response.iter_text()
                read = next(pieces)
                router.process.send_signal(signal.SIGTERM)
                read += "".join(pieces)
            assert read.endswith("data: [DONE]\n\n")
            assert router.wait() == 0


@pytest.mark.parametrize(("num_cores", "num_workers"), [(1, 1), (2, 1), (3, 2), (5, 4), (64, 4)])
def test_a_core_is_left_to_the_router(monkeypatch: pytest.MonkeyPatch, num_cores: int, num_workers: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(num_cores)))
    assert envoy_process.num_envoy_workers() == num_workers


def test_addresses_of_a_picker_that_others_may_reach_are_known() -> None:
    assert all(StandalonePickerFront(address).is_local for address in ("127.0.0.1:9002", "[::1]:9002", "localhost:0"))
    open_addresses = ("0.0.0.0:9002", "[::]:9002", "10.0.0.7:9002", "picker:9002")
    assert not any(StandalonePickerFront(address).is_local for address in open_addresses)
