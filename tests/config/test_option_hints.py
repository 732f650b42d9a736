"""Options of other engines: what is said of them is true of this one."""

import re
from pathlib import Path

import pytest
import typer

from headstart.cli import main as cli
from headstart.config.config_file import ConfigError, all_option_fields, read_config_file, read_environment
from headstart.config.option_hints import HINTS, hint_for_unknown_flag


def flags_of(verb: str) -> set[str]:
    """Every flag of a verb, both ways of a switch."""
    parameters = typer.main.get_command(cli.app).commands[verb].params  # type: ignore[attr-defined]
    return {flag for parameter in parameters for flag in (*parameter.opts, *parameter.secondary_opts)}


def test_every_flag_that_a_hint_names_exists() -> None:
    known = flags_of("serve") | flags_of("route")
    wrong = {
        flag: named
        for flag, hint in HINTS.items()
        for named in re.findall(r"--[a-z][a-z-]*", hint)
        if named not in known
    }
    assert wrong == {}


def test_every_choice_that_a_hint_names_exists() -> None:
    for flag, name in (
        ("--schedule-policy", "scheduling_policy"),
        ("--policy", "routing_policy"),
        ("--radix-eviction-policy", "eviction_policy"),
        ("--disable-uvicorn-access-log", "access_log"),
    ):
        choices = next(f.metadata["choices"] for f in all_option_fields() if f.name == name)
        named = re.split(r", | or ", HINTS[flag].split(" ", 2)[2])
        assert set(named) <= set(choices), flag


def test_no_hint_is_for_an_option_that_exists() -> None:
    known = flags_of("serve")
    assert [flag for flag in HINTS if flag in known] == []


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        ("serve m --mem-fraction-static 0.9", "--mem-fraction-static; use --gpu-memory-utilization, or on a CPU"),
        ("serve m --mem-fraction-static=0.9", "--mem-fraction-static; use --gpu-memory-utilization, or on a CPU"),
        ("serve m --kv-cache-memory-bytes 9", "--kv-cache-memory-bytes; use --kv-cache-memory 6GiB"),
        ("serve m --pipeline-parallel-size 2", "a model is not split over devices; --replicas N"),
        ("serve m -tp 2", "-tp; a model is not split over devices"),
        ("serve -hf foo/bar", "-hf; the model is named without a flag: headstart serve MODEL"),
        ("serve -hfr foo/bar", "-hfr; the model is named without a flag: headstart serve MODEL"),
        ("serve --model m", "--model; the model is named without a flag: headstart serve MODEL"),
        ("serve --model-path m", "--model-path; the model is named without a flag: headstart serve MODEL"),
        ("serve m --trust-remote-code", "--trust-remote-code; code from a checkpoint is never run"),
        ("serve m --no-enable-chunked-prefill", "prompts are always computed in chunks"),
        ("serve m --load-format dummy", "random weights (dummy): headstart init-model"),
        ("serve m --override-generation-config {}", "use --generation-config FOLDER"),
        ("serve m --collect-detailed-traces all", "--collect-detailed-traces; use --otlp-endpoint"),
        ("serve m -j {}", "response_format or structured_outputs in its body"),
        ("serve m --context-length 4096", "--context-length; use --max-model-len"),
        ("serve m --mem_fraction_static 0.8", "--memory-limit 8GiB"),
        ("serve m -c 4096", "-c; use --max-model-len"),
        ("serve m -ngl 99", "-ngl; layers are not split over CPU and GPU; use --device"),
        ("serve m -np 4", "-np; use --max-num-seqs"),
        ("serve m --replica http://a", "--replica; it is an option of headstart route"),
        ("route --worker-urls http://a", "--worker-urls; use --replica URL"),
        ("route --max-model-len 9", "--max-model-len; it is an option of headstart serve and headstart generate"),
        ("serve m --max-model-length 9", "Possible options: --max-model-len"),
        ("serve m --nonsense", "No such option: --nonsense"),
    ],
)
def test_an_option_of_another_engine_gets_a_hint(argv: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv.split()) == 2
    shown = capsys.readouterr().err
    assert complaint in shown and shown.startswith("headstart: No such option") and shown.count("\n") == 1, shown


def test_all_unknown_options_are_named_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    argv = "serve m --tp 2 --port 9000 --nonsense 3 --load-format=dummy --dtype auto --context-length 9"
    assert cli.main(argv.split()) == 2
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert [flag for flag in ("--tp", "--nonsense", "--load-format", "--context-length") if flag not in shown] == []
    assert "--replicas N" in shown and "use --max-model-len" in shown and "--port" not in shown


@pytest.mark.parametrize(
    "argv",
    [
        "--guided-decoding-backend xgrammar",
        "--guided-decoding-backend=xgrammar",
        "--enforce-eager",
        "--enable-chunked-prefill",
        "--disable-log-requests",
        "--max-seq-len-to-capture 8192 --enable_prompt_tokens_details",
    ],
)
def test_what_changes_no_answer_is_left_out_with_a_warning(argv: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", *argv.split(), "/no/such/folder", "--port", "0"]) == 2
    *warnings, last = capsys.readouterr().err.splitlines()
    assert "there is no folder '/no/such/folder'" in last
    assert len(warnings) == argv.count("--") and all(" is left out: not needed: " in line for line in warnings)


@pytest.mark.parametrize(
    ("argv", "names", "model"),
    [
        ("m --served-model-name a b c --port 1", ("a", "b", "c"), "m"),
        ("m --served-model-name a --served-model-name b", ("a", "b"), "m"),
        ("--served-model-name a m", ("a",), "m"),
        ("--served-model-name a b m", ("a", "b"), "m"),
        ("--served-model-name a --port 1 m", ("a",), "m"),
        ("--served-model-name=a m", ("a",), "m"),
    ],
)
def test_a_model_may_have_several_names(
    argv: str, names: tuple[str, ...], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    got: list[object] = []

    def settled(options: type, *sources: dict[str, object]) -> object:
        got.append({name: value for source in reversed(sources) for name, value in source.items()})
        raise ConfigError("enough")

    monkeypatch.setattr("headstart.cli.serve.merge_option_sources", settled)
    assert cli.main(["serve", *argv.split()]) == 2
    [values] = got
    assert isinstance(values, dict) and (values["served_model_name"], values["model"]) == (names, model)


def test_values_that_look_like_options_are_no_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "/no/such/folder", "--api-key", "--enforce-eager", "--seed", "-1"]) == 2
    assert capsys.readouterr().err.startswith("headstart: there is no folder")


@pytest.mark.parametrize(
    "argv",
    [
        "--dtype bfloat16",
        "--max-model-len 8",
        "--max-num-seqs 4",
        "--enable-prefix-caching",
        "--seed 1",
        "--served-model-name x",
        "--block-size 32",
        "--api-key k",
        "--no-enable-prefix-caching",
        "--host h",
        "--gpu-memory-utilization 0.8",
        "--tensor-parallel-size 1",
    ],
)
def test_options_with_the_names_of_vllm_are_taken(argv: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "/no/such/folder", *argv.split()]) == 2
    assert "there is no folder '/no/such/folder'" in capsys.readouterr().err


def test_file_and_environment_give_the_same_hints(tmp_path: Path) -> None:
    (tmp_path / "headstart.toml").write_text("mem_fraction_static = 0.9")
    with pytest.raises(ConfigError, match="unknown option 'mem_fraction_static'; use --gpu-memory-utilization"):
        read_config_file(None, tmp_path)
    _, warnings = read_environment({"HEADSTART_PIPELINE_PARALLEL_SIZE": "2"})
    assert warnings == [
        "HEADSTART_PIPELINE_PARALLEL_SIZE is not an option and has no effect; a model is not split over devices; "
        "--replicas N serves it N times behind one router"
    ]
    assert (
        hint_for_unknown_flag("--mem_fraction_static") == HINTS["--mem-fraction-static"]
        and hint_for_unknown_flag("--port") is None
    )
