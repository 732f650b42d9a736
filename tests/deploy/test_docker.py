"""deploy/docker: Dockerfile and Compose file are valid, agree with our options, and monitor metrics that exist."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import jsonschema
import pytest
import yaml
from deploy.manifests import ROOT
from deploy.test_manifests import OPTIONS, POD_OWNERS, container

from headstart.config.options import flag_name

FOLDER = ROOT / "deploy" / "docker"
DOCKERFILE = (FOLDER / "Dockerfile").read_text(encoding="utf-8")
COMPOSE = yaml.safe_load((FOLDER / "compose.yaml").read_text(encoding="utf-8"))
BOARDS = {
    path.stem: json.loads(path.read_text(encoding="utf-8")) for path in (FOLDER / "grafana/dashboards").glob("*.json")
}
RULES = yaml.safe_load((FOLDER / "prometheus/rules.yml").read_text(encoding="utf-8"))
SCHEMA = json.loads((ROOT / "tests/data/compose-spec.json").read_text(encoding="utf-8"))
OURS = ("replica", "router")
OF_VLLM = {  # of those that vLLM documents (docs.vllm.ai, Production Metrics), the ones that the board and alerts use
    *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),
    *("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total", "vllm:num_preemptions_total"),
    *("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:request_success_total"),
    *(
        f"vllm:{name}{end}"
        for name in (
            *("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"),
            *("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"),
            *("request_prompt_tokens", "request_generation_tokens"),
        )
        for end in ("_bucket", "_sum", "_count")
    ),
}


def lint(path: Path) -> tuple[int, str]:
    program = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([str(program), "--no-color", str(path)], capture_output=True, text=True)
    return done.returncode, done.stdout


def stages() -> dict[str, str]:
    """The instructions of each stage of the Dockerfile, those of the stages that it is made from included."""
    found: dict[str, str] = {}
    for part in re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[1:]:
        source, _, name = part.split("\n")[0].split(" ")
        found[name] = found.get(source, "") + part
    return found


def instruction(stage: str, name: str) -> str:
    """The last such instruction of a stage, continued lines joined."""
    text = re.sub(r"\\\n", " ", stages()[stage])
    return re.findall(rf"^{name} (.*)$", text, re.MULTILINE)[-1]


def test_the_dockerfile_passes_hadolint() -> None:
    assert lint(FOLDER / "Dockerfile") == (0, "")


def test_hadolint_finds_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM debian:latest\nRUN cd /tmp && sudo pip install x\nCMD headstart\n")
    status, found = lint(tmp_path / "Dockerfile")
    assert status == 1 and {"DL3007", "DL3003", "DL3004", "DL3025"} <= set(re.findall(r"DL\d+", found))


@pytest.mark.parametrize("stage", ["server", "router"])
def test_images_run_as_a_user_without_rights_and_are_checked(stage: str) -> None:
    assert instruction(stage, "USER") == "65532:65532"
    assert "g++" not in stages()[stage]
    assert json.loads(instruction(stage, "ENTRYPOINT")) == ["headstart"]
    verb, *words = json.loads(instruction(stage, "CMD"))
    assert {word for word in words if word.startswith("--")} <= {flag_name(field.name) for field in OPTIONS[verb]}


def test_images_have_the_extras_that_the_manifests_need() -> None:
    extras = set(re.findall(r"\$\{wheel\}\[([a-z,]+)\]", stages()["router"])[-1].split(","))
    flags = " ".join(container(POD_OWNERS[1])["args"])
    assert ("kubernetes:" in flags) <= ("kubernetes" in extras) and ("--ext-proc" in flags) <= ("picker" in extras)


@contextmanager
def answering(status: int) -> Iterator[int]:
    """A server that answers every path with that status; its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/livez" else 404)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(("status", "is_healthy"), [(200, True), (503, False), (404, False)])
def test_the_health_check_fails_unless_the_process_answers(status: int, is_healthy: bool) -> None:
    command = json.loads(re.sub(r"^.*?CMD ", "", instruction("server", "HEALTHCHECK")))
    command[0] = sys.executable
    with answering(status) as port:
        env = {**os.environ, "HEADSTART_PORT": str(port)}
        assert (subprocess.run(command, env=env, capture_output=True).returncode == 0) == is_healthy
    assert subprocess.run(command, env=env, capture_output=True).returncode != 0  # nothing listens there any more


def test_what_is_copied_into_the_image_is_in_its_context() -> None:
    allowed = re.findall(r"^!(.*)$", (ROOT / ".dockerignore").read_text(encoding="utf-8"), re.MULTILINE)
    copied = [
        word.removeprefix("./")
        for line in re.findall(r"^COPY (.*)$", DOCKERFILE, re.MULTILINE)
        for word in line.split()[:-1]
    ]
    assert sorted(copied) == sorted(allowed)
    assert all((ROOT / name).exists() for name in copied)


def test_the_compose_file_is_valid() -> None:
    validator = jsonschema.Draft7Validator(SCHEMA)
    assert [error.message for error in validator.iter_errors(COMPOSE)] == []
    wrong = json.loads(json.dumps(COMPOSE))
    wrong["services"]["router"]["comand"] = []
    assert any("comand" in error.message for error in validator.iter_errors(wrong))


@pytest.mark.parametrize("name", OURS)
def test_our_services_are_built_hardened_and_started_with_options_that_exist(name: str) -> None:
    service = COMPOSE["services"][name]
    assert service["build"]["target"] in stages()
    assert (FOLDER / service["build"]["context"] / service["build"]["dockerfile"]).samefile(FOLDER / "Dockerfile")
    assert service["read_only"] and service["cap_drop"] == ["ALL"]
    verb, *words = service["command"]
    fields = OPTIONS[verb]
    assert {word for word in words if word.startswith("--")} <= {flag_name(field.name) for field in fields}
    assert set(service["environment"]) <= {"HEADSTART_" + field.name.upper() for field in fields}
    assert int(service["stop_grace_period"].removesuffix("s")) >= 120 + 10  # drain_timeout


def test_everything_is_open_to_this_machine_only_and_files_exist() -> None:
    ports = [port for service in COMPOSE["services"].values() for port in service.get("ports", ())]
    assert len(ports) == 3 and all(port.startswith("127.0.0.1:") for port in ports)
    sources = [v.split(":")[0] for service in COMPOSE["services"].values() for v in service.get("volumes", ())]
    assert [one for one in sources if one.startswith(".") and not (FOLDER / one).is_dir()] == []
    assert {one for one in sources if not one.startswith(".")} == set(COMPOSE["volumes"])
    config = yaml.safe_load((FOLDER / "prometheus/prometheus.yml").read_text(encoding="utf-8"))
    assert [(FOLDER / "prometheus" / name).exists() for name in config["rule_files"]] == [True]
    [router] = [one for one in config["scrape_configs"] if "authorization" in one]
    [secret] = COMPOSE["services"]["prometheus"]["secrets"]
    assert router["authorization"]["credentials_file"] == f"/run/secrets/{secret}"


def exported() -> set[str]:
    """The names of all series that server and router export, from pages that docs/generate.py writes from scrapes."""
    found: set[str] = set()
    for page in ("metrics.md", "routing.md"):
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        for name, kind in re.findall(r"^\| `((?:vllm|headstart):\w+)`[^|]*\| (\w+) \|", text, re.MULTILINE):
            found |= {name + end for end in ("_bucket", "_sum", "_count")} if kind == "histogram" else {name}
    return found


def series(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:vllm|headstart):\w+", expression))


def expressions(board: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]


def test_the_board_and_the_alerts_of_engines_are_for_vllm_too() -> None:
    [group] = [group for group in RULES["groups"] if group["name"] == "engines"]
    used = [*expressions(BOARDS["engines"]), *(rule["expr"] for rule in group["rules"])]
    assert len(used) > 20 and set().union(*map(series, used)) - OF_VLLM == set()
    assert all(
        f'{variable["name"]}=~"${variable["name"]}"' in expr
        for expr in expressions(BOARDS["engines"])
        for variable in BOARDS["engines"]["templating"]["list"]
    )


def test_every_metric_of_the_board_and_of_the_rules_exists() -> None:
    recorded = {rule["record"] for group in RULES["groups"] for rule in group["rules"] if "record" in rule}
    rules = [series(rule["expr"]) for group in RULES["groups"] for rule in group["rules"]]
    panels = [series(expr) for board in BOARDS.values() for expr in expressions(board)]
    assert len(rules) > 5 and len(panels) > 20 and all(rules) and all(panels)
    assert set().union(*rules) - exported() == set()
    assert set().union(*panels) - exported() - recorded == set()
    assert recorded <= set().union(*panels)
    assert series("rate(headstart:no_such_total[5m])") - exported()


@pytest.mark.parametrize("name", sorted(BOARDS))
def test_panels_have_names_of_their_own_and_do_not_overlap(name: str) -> None:
    panels = BOARDS[name]["panels"]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for grid in (panel["gridPos"] for panel in panels)
        for x in range(grid["x"], grid["x"] + grid["w"])
        for y in range(grid["y"], grid["y"] + grid["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24
    source = yaml.safe_load((FOLDER / "grafana/provisioning/datasources/prometheus.yml").read_text(encoding="utf-8"))
    used = {target["datasource"]["uid"] for panel in panels for target in panel.get("targets", ())}
    assert used == {one["uid"] for one in source["datasources"]}
