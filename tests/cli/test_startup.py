"""Mistakes are reported, and help is shown, before torch is imported: one line, exit code 2."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.core import TyperGroup

from headstart.cli import main as cli
from headstart.core.errors import ConfigError
from headstart.model.weights.architectures import causal_model_types, check_model_folder

_RUN = """
import contextlib, io, json, sys
from headstart.cli import main as cli
results = []
for argv in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(argv)
    heavy = [name for name in ("torch", "transformers", "headstart.server.run_server") if name in sys.modules]
    results.append({"code": code, "out": out.getvalue(), "err": err.getvalue(), "heavy": heavy})
print(json.dumps(results))
"""


def run(commands: list[list[str]], folder: Path) -> list[dict[str, Any]]:
    """Return each command's output and exit code, and the slow modules it imported; all in one new process."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADSTART_")}
    argv = [sys.executable, "-c", _RUN, json.dumps(commands)]
    done = subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def write_model(folder: Path, config: str) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(config, encoding="utf-8")
    (folder / "model.safetensors").write_bytes(b"")


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """Folders that hold no model that can be served."""
    (tmp_path / "empty").mkdir()
    write_model(tmp_path / "malformed", "{bad")
    write_model(tmp_path / "nameless", "{}")
    write_model(tmp_path / "unknown", '{"architectures": ["NovelForCausalLM"], "model_type": "novel"}')
    write_model(tmp_path / "t5", '{"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"}')
    write_model(
        tmp_path / "awq", '{"architectures": ["LlamaForCausalLM"], "quantization_config": {"quant_method": "awq"}}'
    )
    return tmp_path


MISTAKES = [
    ("serve /no/such/path", "there is no folder '/no/such/path'"),
    ("serve smollm2", "did you mean smollm2-135m?"),
    ("serve smollm2-135", "did you mean smollm2-135m?"),
    ("serve empty", "has no config.json"),
    ("serve malformed", "malformed/config.json cannot be read"),
    ("serve nameless", "config.json names no architecture"),
    ("serve unknown", "NovelForCausalLM is not supported"),
    ("serve t5", "T5ForConditionalGeneration is not supported"),
    ("serve awq", "the checkpoint is quantised (awq)"),
    ("serve --replicas 2 unknown", "NovelForCausalLM is not supported"),
    ("serve --max-num-seqs 0", "max_num_seqs is 0; it must be at least 1"),
    ("serve --block-size 24", "block_size is 24; it must be a multiple of 16"),
    ("serve --dtype half", "choose one of auto, bfloat16, float32"),
    ("serve --device tpu", "device 'tpu' is not supported"),
    ("serve --memory-limit much", "memory_limit: 'much' is not a size"),
    ("serve --kv-cache-memory 0.5", "kv_cache_memory: '0.5' is not a size"),
    ("serve --kv-store-size 1MiB --kv-store x", "kv_store_size is 1.0 MiB"),
    ("serve --kv-events-config {", "kv_events_config"),
    ("serve --speculative-config {}", "speculative_config: method is None"),
    ("generate --model /no/such hi", "there is no folder '/no/such'"),
    ("generate --model unknown hi", "NovelForCausalLM is not supported"),
    ("generate --chat --system @nope hi", "cannot read the system message from nope"),
    ("bench rotations --model /no/such", "there is no folder '/no/such'"),
    ("bench decode --model malformed", "malformed/config.json cannot be read"),
    ("bench rotations --dtype half", "choose one of auto, bfloat16, float32"),
    ("bench rotations --threads -1", "threads is -1"),
    ("bench lab repeat --model unknown", "NovelForCausalLM is not supported"),
    ("init-model out --shape huge", "there is no shape 'huge'"),
    ("init-model out --shape tiny --dtype int4", "there is no dtype 'int4'"),
    ("explain", "give one of ID, --prompt and --file"),
    ("prefix add x --file nope", "cannot read nope"),
    ("store stat nope", "nope is no folder"),
    ("store verify nope", "nope is no folder"),
    ("serv", "No such command 'serv'"),
]


def test_a_mistake_is_one_line_and_exit_code_2_before_torch_is_imported(models: Path) -> None:
    for (command, complaint), shown in zip(MISTAKES, run([c.split() for c, _ in MISTAKES], models), strict=True):
        assert (shown["code"], shown["out"], shown["heavy"]) == (2, "", []), (command, shown)
        error = [line for line in shown["err"].splitlines() if not line.startswith("...")]  # a stage of a benchmark
        assert complaint in shown["err"] and len(error) == 1, (command, shown)


def test_a_router_without_replicas_or_tokenizer_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    mistakes = ["route", "route --replica http://127.0.0.1:1 --tokenizer /no/such", "route --discover nonsense"]
    for command, shown in zip(mistakes, run([mistake.split() for mistake in mistakes], tmp_path), strict=True):
        assert shown["code"] == 2 and shown["err"].count("\n") == 1, (command, shown)
        assert "torch" not in shown["heavy"] and "transformers" not in shown["heavy"], command


def every_command(command: Any = None, path: tuple[str, ...] = ()) -> list[list[str]]:
    """Every group and verb of the command line."""
    command = typer.main.get_command(cli.app) if command is None else command
    found = [list(path)]
    if isinstance(command, TyperGroup):
        for name in command.list_commands(None):
            found += every_command(command.get_command(None, name), (*path, name))
    return found


def test_help_of_every_verb_imports_no_torch(tmp_path: Path) -> None:
    commands = every_command()
    assert ["bench", "lab", "repeat"] in commands and ["store", "stat"] in commands
    for command, shown in zip(commands, run([[*c, "--help"] for c in commands], tmp_path), strict=True):
        assert (shown["code"], shown["heavy"]) == (0, []), command
        assert shown["out"].startswith(" ".join(["Usage: headstart", *command])), shown["out"][:80]


def test_an_engine_process_finds_a_model_that_is_not_there_before_torch_is_imported(models: Path) -> None:
    code = """
import sys
from headstart.cli.build_engine import build_engine
from headstart.core.errors import ConfigError
from headstart.config.options import EngineOptions
for model in ("someone/not-downloaded", "unknown"):
    try:
        build_engine(EngineOptions(model=model, offline=True))
    except ConfigError as error:
        print(error)
sys.exit("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=models, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert "not (completely) downloaded" in first and "NovelForCausalLM is not supported" in second


def test_the_model_types_read_from_the_source_are_those_of_transformers() -> None:
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    assert causal_model_types() == frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    refused = set(CONFIG_MAPPING) - set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    wrongly = [name for name in sorted(refused) if CONFIG_MAPPING[name] in MODEL_FOR_CAUSAL_LM_MAPPING]
    assert len(refused) > 100 and wrongly == []  # what loading accepts is not refused before


def test_an_unreadable_source_of_transformers_refuses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "unknown", '{"architectures": ["NovelForCausalLM"], "model_type": "novel"}')
    with pytest.raises(ConfigError, match="no causal language model of model_type 'novel'"):
        check_model_folder(tmp_path / "unknown")
    monkeypatch.setattr("headstart.model.weights.architectures.causal_model_types", lambda: None)
    check_model_folder(tmp_path / "unknown")
