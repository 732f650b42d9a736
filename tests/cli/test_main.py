"""The command line: help, errors, precedence, and each verb once."""

import dataclasses
import io
import json
import re
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headstart import __version__
from headstart.cli import main as cli
from headstart.cli.build_engine import build_engine
from headstart.cli.serve import NOT_OF_A_SERVER
from headstart.config.config_file import all_option_fields
from headstart.config.options import EngineOptions, RouterOptions, ServerOptions, flag_name
from headstart.core.errors import ConfigError
from headstart.model.weights.shapes import SHAPES

Served = list[tuple[EngineOptions, ServerOptions]]


@pytest.fixture(autouse=True)
def bare_surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty working folder, a wide terminal and no HEADSTART_* variable."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "110")
    for field in all_option_fields():
        monkeypatch.delenv(f"HEADSTART_{field.name.upper()}", raising=False)
    monkeypatch.delenv("HEADSTART_DEBUG", raising=False)
    monkeypatch.delenv("HEADSTART_CONFIG", raising=False)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    """The options that `headstart serve` would have served."""
    calls: Served = []

    def serve(build: Callable[..., object], engine: EngineOptions, server: ServerOptions) -> int:
        assert build is build_engine
        if engine.model == "broken":
            raise ConfigError("no such model")
        if engine.model == "bug":
            raise KeyError("oops")
        if engine.model == "interrupted":
            raise KeyboardInterrupt
        if engine.model == "interrupted twice":
            try:
                raise KeyboardInterrupt
            finally:
                raise KeyError("left in its middle")
        calls.append((engine, server))
        return 3 if engine.model == "three" else 0

    module = types.ModuleType("headstart.server.run_server")
    module.serve = serve  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "headstart.server.run_server", module)
    return calls


@pytest.mark.parametrize(
    "verb", ["serve", "generate", "doctor", "init-model", "bench", "bench lab", "store", "store verify", ""]
)
def test_every_verb_has_help_that_fits_the_width(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*verb.split(), "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"Usage: headstart {verb}".rstrip())
    assert max(map(len, shown.splitlines())) <= 110


def test_serve_help_names_every_option_and_its_default_once(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["serve", "--help"])
    shown = capsys.readouterr().out.split("Examples:")[0]
    left = [re.split(r" {2,}", line.strip())[0] for line in shown.splitlines() if line.startswith("  -")]
    flags = re.findall(r"--(?:\[no-\])?([a-z-]+)", " ".join(left))
    for field in all_option_fields():
        is_shown = field.name not in ("model", *NOT_OF_A_SERVER)
        assert flags.count(flag_name(field.name).removeprefix("--")) == is_shown, field.name
    assert "[8000]" in shown and "Scheduling and caching:" in shown


def test_help_of_init_model_names_every_shape(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["init-model", "--help"])
    shown = capsys.readouterr().out
    assert [name for name in SHAPES if name not in shown] == []


@pytest.mark.parametrize(
    ("words", "spared"),
    [
        (["serve", "--help"], {"torch", "headstart.server.app", "headstart.cli.store", "headstart.http.web_pages"}),
        (["--version"], {"torch", "headstart.cli.serve", "headstart.cli.store", "rich.console"}),
        (["serve", "/no/such/model"], {"torch", "huggingface_hub", "headstart.server.app"}),
    ],
)
def test_a_verb_loads_what_it_needs(words: list[str], spared: set[str]) -> None:
    code = (
        f"import sys; from headstart.cli.main import main; main({words}); sys.exit(bool({spared} & {{*sys.modules}}))"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, timeout=300).returncode == 0


def test_the_process_that_serves_does_not_load_torch_to_name_the_engine_builder() -> None:
    code = "import sys; import headstart.cli.build_engine; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0


def test_version_and_no_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"headstart {__version__}\n"
    assert cli.main([]) == 0
    assert "Commands:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["serv"], "No such command 'serv'"),
        (["serve", "--prot", "1"], "No such option: --prot"),
        (["serve", "--port", "x"], "Invalid value for '--port'"),
        (["serve", "--port", "70000"], "port is 70000; it must be at most 65535"),
        (["serve", "--dtype", "f16"], "choose one of auto, bfloat16, float32"),
        (["serve", "--config", "nope.toml"], "cannot read nope.toml"),
        (["serve", "broken"], "no such model"),
        (["init-model", "out"], "Missing option '--shape'"),
        (["generate", "--system", "x", "y"], "--system needs --chat"),
        (["generate", "--lines", "y"], "--lines reads prompts from stdin"),
        (["generate", "--chat", "--system", "@nope", "y", "--model", "nope"], "nope"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    argv: list[str], complaint: str, served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == 2
    shown = capsys.readouterr()
    assert complaint in shown.err and shown.out == "" and served == []
    assert shown.err.startswith("headstart: ") and shown.err.count("\n") == 1


def test_a_bug_is_one_line_unless_the_traceback_is_asked_for(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(["serve", "bug"]) == 1
    assert "KeyError: 'oops'" in (shown := capsys.readouterr().err) and shown.count("\n") == 1
    monkeypatch.setenv("HEADSTART_DEBUG", "1")
    with pytest.raises(KeyError):
        cli.main(["serve", "bug"])
    with pytest.raises(ConfigError):
        cli.main(["serve", "broken"])


def test_ctrl_c_is_exit_code_130_and_the_code_of_serve_is_passed_on(served: Served) -> None:
    assert cli.main(["serve", "interrupted"]) == cli.main(["serve", "interrupted twice"]) == 130
    assert cli.main(["serve", "three"]) == 3


def test_flags_win_over_environment_over_file_over_defaults(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "headstart.toml").write_text('port = 1\nhost = "file"\nmax_n = 5\nmodel = "from-file"', "utf-8")
    monkeypatch.setenv("HEADSTART_PORT", "2")
    monkeypatch.setenv("HEADSTART_HOST", "environment")
    assert cli.main(["serve", "--port", "3"]) == 0
    engine, server = served[0]
    assert (server.port, server.host, server.max_n, server.max_prompts) == (3, "environment", 5, 64)
    assert engine.model == "from-file"
    assert cli.main(["serve", "named"]) == 0
    assert served[1][0].model == "named"


def test_config_names_another_file_by_flag_or_variable(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.toml").write_text("port = 1", encoding="utf-8")
    (tmp_path / "b.toml").write_text("port = 2", encoding="utf-8")
    monkeypatch.setenv("HEADSTART_CONFIG", "a.toml")
    assert cli.main(["serve"]) == 0 and cli.main(["serve", "--config", "b.toml"]) == 0
    assert [server.port for _, server in served] == [1, 2]


def test_serve_without_anything_serves_the_defaults(served: Served) -> None:
    assert cli.main(["serve"]) == 0
    assert served == [(EngineOptions(), ServerOptions())]


def test_several_replicas_are_served_by_a_router(monkeypatch: pytest.MonkeyPatch, served: Served) -> None:
    calls: list[tuple[EngineOptions, ServerOptions, RouterOptions]] = []

    def serve_replicas(*options: Any) -> int:
        calls.append(options)
        return 5

    module = types.ModuleType("headstart.cli.replicas")
    module.serve_replicas = serve_replicas  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "headstart.cli.replicas", module)
    assert cli.main(["serve", "m", "--replicas", "2", "--port", "9", "--routing-policy", "weighted"]) == 5
    ((engine, server, router),) = calls
    assert (engine.model, server.port, router.replicas, router.routing_policy) == ("m", 9, 2, "weighted")
    assert cli.main(["serve", "m", "--replicas", "1"]) == 0 and len(served) == 1  # one needs no router
    assert cli.main(["serve", "--replicas", "0"]) == 2 and len(calls) == 1


def test_a_ray_cluster_is_given_the_options_and_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    def serve_on_ray(*options: Any, address: str | None) -> int:
        calls.append((*options, address))
        return 7

    module = types.ModuleType("headstart.gateway.ray.run_ray")
    module.serve_on_ray = serve_on_ray  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "headstart.gateway.ray.run_ray", module)
    monkeypatch.setattr("headstart.cli.serve.RAY_DEFAULTS", {})
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    words = ["serve", "m", "--on", "ray", "--replicas", "2", "--max-replicas", "4", "--port", "9"]
    assert cli.main(words) == 7
    ((engine, server, router, address),) = calls
    assert (engine.model, server.port, router.replicas, router.max_replicas) == ("m", 9, 2, 4)
    assert address == "head:6379"


def test_without_ray_its_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delitem(sys.modules, "headstart.gateway.ray.run_ray", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    assert cli.main(["serve", "--on", "ray"]) == 2
    assert capsys.readouterr().err == "headstart: --on ray needs ray: pip install 'headstart[ray]'\n"


def test_switches_can_be_turned_both_ways_and_keys_repeated(served: Served) -> None:
    switches = ["--no-enable-prefix-caching", "--offline", "--no-access-log"]
    assert cli.main(["serve", *switches, "--api-key", "a", "--api-key", "b", "--num-blocks", "9"]) == 0
    engine, server = served[0]
    assert engine == dataclasses.replace(
        EngineOptions(), enable_prefix_caching=False, offline=True, num_gpu_blocks_override=9
    )
    assert server.api_key == ("a", "b") and server.access_log == "none"


@pytest.mark.parametrize(
    ("argv", "access_log"),
    [
        ("", "auto"),
        ("--access-log", "requests"),
        ("--access-log --port 9", "requests"),
        ("--access-log errors", "errors"),
        ("--access-log=all", "all"),
        ("--no-access-log", "none"),
        ("--access-log none m", "none"),
    ],
)
def test_the_access_log_is_a_choice_and_still_a_switch(argv: str, access_log: str, served: Served) -> None:
    assert cli.main(["serve", *argv.split()]) == 0
    assert served[0][1].access_log == access_log


@pytest.mark.parametrize(("text", "access_log"), [("1", "requests"), ("false", "none"), ("errors", "errors")])
def test_the_access_log_was_a_switch_in_file_and_environment_too(
    text: str, access_log: str, served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = {"1": "true", "false": "false"}.get(text, f'"{text}"')
    (tmp_path / "headstart.toml").write_text(f"access_log = {value}", "utf-8")
    assert cli.main(["serve"]) == 0
    (tmp_path / "headstart.toml").unlink()
    monkeypatch.setenv("HEADSTART_ACCESS_LOG", text)
    assert cli.main(["serve"]) == 0
    assert [server.access_log for _, server in served] == [access_log] * 2


def test_an_access_log_of_another_kind_is_refused(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--access-log", "everything"]) == 2 and served == []
    assert "access_log is 'everything'; choose one of auto, all" in capsys.readouterr().err


def test_a_misspelt_variable_is_warned_of(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADSTART_PROT", "1")
    assert cli.main(["serve"]) == 0
    assert "did you mean HEADSTART_PORT?" in capsys.readouterr().err


def test_doctor_reports_for_people_and_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    assert "compute threads" in capsys.readouterr().out
    assert cli.main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sections"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of shape tiny, as `headstart init-model` writes it."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    assert cli.main(["init-model", "--shape", "tiny", str(folder), "--std", "0.2", "--dtype", "float32"]) == 0
    return folder


def test_init_model_writes_a_model_and_does_not_write_over_one(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert {path.name for path in tiny.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert cli.main(["init-model", "--shape", "tiny", str(tiny)]) == 2
    assert "is not empty" in capsys.readouterr().err


GREEDY = ["--temperature", "0", "--max-tokens", "4", "--num-blocks", "64"]


def test_generate_prints_the_text_of_each_prompt_in_order(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["generate", "--model", str(tiny), *GREEDY, "--json"]
    assert cli.main([*argv, "hello", "hello there"]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["completion_tokens"] == len(first["token_ids"]) == 4
    assert first["prompt_tokens"] < second["prompt_tokens"] and first["cached_tokens"] == 0
    assert cli.main([*argv[:-1], "hello"]) == 0
    assert capsys.readouterr().out == first["text"] + "\n"


def test_generate_reads_one_prompt_from_stdin(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "prompt.txt").write_text("hello", encoding="utf-8")
    with (tmp_path / "prompt.txt").open(encoding="utf-8") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert cli.main(["generate", "--model", str(tiny), *GREEDY, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["prompt_tokens"] >= 1


def test_generate_reads_a_prompt_from_each_line(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n\nhello there\n"))
    assert cli.main(["generate", "--model", str(tiny), *GREEDY, "--lines", "--json"]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["prompt_tokens"] < second["prompt_tokens"]


def test_generate_refuses_a_wrong_value_in_one_line(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "--model", str(tiny), "--num-blocks", "64", "--temperature", "-1", "hello"]) == 2
    assert "temperature" in capsys.readouterr().err
