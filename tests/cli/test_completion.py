"""Completion in shells, by the scripts that `headstart --install-completion` installs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A path with a `headstart` that fails if it imports torch."""
    command = tmp_path / "headstart"
    code = "import sys; sys.modules['torch'] = None; from headstart.__main__ import main; sys.exit(main())"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{code}" "$@"\n')
    command.chmod(0o755)
    (tmp_path / "models" / "first").mkdir(parents=True)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "HOME": str(tmp_path)}


def run(command: list[str], environment: dict[str, str], **more: str) -> str:
    done = subprocess.run(
        command, env={**environment, **more}, cwd=environment["HOME"], capture_output=True, text=True, timeout=300
    )
    assert done.stderr == "", done.stderr
    return done.stdout


COMPLETIONS = [
    (["serv"], ["serve"]),
    (["store", ""], ["stat", "verify", "clear"]),
    (["bench", "lab", "rep"], ["repeat"]),
    (["serve", "--max-model"], ["--max-model-len"]),
    (["serve", "--no-enable-p"], ["--no-enable-prefix-caching"]),
    (["serve", "--dtype", ""], ["auto", "bfloat16", "float32"]),
    (["serve", "--access-log", "e"], ["errors"]),
    (["route", "--routing-policy", "we"], ["weighted"]),
]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_verbs_options_and_choices(environment: dict[str, str]) -> None:
    script = run(["headstart"], environment, _HEADSTART_COMPLETE="source_bash")
    for words, offered in COMPLETIONS:
        typed = " ".join(f"'{word}'" for word in ["headstart", *words])
        asked = f"COMP_WORDS=({typed}); COMP_CWORD={len(words)}; _headstart_completion headstart; "
        lines = run(["bash", "-c", f'{script}\n{asked}printf "%s\\n" "${{COMPREPLY[@]}}"'], environment)
        assert lines.split() == offered, words


@pytest.mark.parametrize(("words", "offered"), COMPLETIONS[::3])  # that of bash is the same code
@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_zsh_and_fish_get_the_same_offers(
    shell: str, words: list[str], offered: list[str], environment: dict[str, str]
) -> None:
    asked = {
        "_HEADSTART_COMPLETE": f"complete_{shell}",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        "_TYPER_COMPLETE_ARGS": " ".join(["headstart", *words]),
    }
    shown = run(["headstart"], environment, **asked)
    assert all(name in shown for name in offered) and "--port" not in shown


def test_zsh_and_fish_complete_folders_and_gguf_files_and_bash_does_so_itself(environment: dict[str, str]) -> None:
    asked = {"_TYPER_COMPLETE_ARGS": "headstart serve models/f", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    assert run(["headstart"], environment, _HEADSTART_COMPLETE="complete_fish", **asked).strip() == "models/first/"
    (Path(environment["HOME"]) / "models" / "f.gguf").touch()
    (Path(environment["HOME"]) / "models" / "f.txt").touch()
    shown = run(["headstart"], environment, _HEADSTART_COMPLETE="complete_fish", **asked)
    assert shown.split() == ["models/f.gguf", "models/first/"]
    asked = {"COMP_WORDS": "headstart serve models/f", "COMP_CWORD": "2"}
    assert run(["headstart"], environment, _HEADSTART_COMPLETE="complete_bash", **asked).strip() == ""
    assert "complete -o default" in run(["headstart"], environment, _HEADSTART_COMPLETE="source_bash")
