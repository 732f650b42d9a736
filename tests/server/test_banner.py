"""The banner's command is one that the server answers sensibly, as it stands there."""

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizer_folders
from server.harness import PATIENCE, inside, spawn

from headstart.bundled import bundled_intent_model_folder
from headstart.config.options import ServerOptions, TenantEntry
from headstart.model.kernels.build import packaged_library
from headstart.model.kernels.library import runnable_variants
from headstart.server.banner import startup_banner


def shown(folder: str, options: ServerOptions | None = None) -> str:
    async def run() -> str:
        async with inside(folder) as server:
            return startup_banner(server.state.loaded_model, options or ServerOptions(), "127.0.0.1", 8000)

    return asyncio.run(run())


def request(text: str) -> tuple[str, dict[str, Any]]:
    found = re.search(r"curl http://127.0.0.1:8000(/\S+) .*?\n +-d '([^']*)'$", text, re.DOTALL)
    assert found is not None, text
    return found[1], json.loads(found[2])


def test_a_chat_model_is_asked_in_a_chat(folder: str) -> None:
    path, body = request(shown(folder))
    assert path == "/v1/chat/completions" and body["messages"][0]["role"] == "user"


def test_a_model_without_a_chat_template_continues_a_text(tmp_path: Path) -> None:
    folder = tokenizer_folders.write(tmp_path / "base", tokenizer_folders.BYTE_LEVEL)
    config = folder / "tokenizer_config.json"
    values = json.loads(config.read_text(encoding="utf-8"))
    values.pop("chat_template")
    config.write_text(json.dumps(values), encoding="utf-8")
    path, body = request(shown(str(folder)))
    assert path == "/v1/completions" and body["prompt"]


def test_the_bundled_model_is_asked_for_an_intent() -> None:
    path, body = request(shown(str(bundled_intent_model_folder())))
    assert path == "/v1/chat/completions"
    assert [message["role"] for message in body["messages"]] == ["system", "user"] and body["temperature"] == 0


@pytest.mark.parametrize("options", [ServerOptions(api_key=("k",)), ServerOptions(tenants=(TenantEntry("a", ("k",)),))])
def test_a_command_that_needs_a_key_says_so(folder: str, options: ServerOptions) -> None:
    text = shown(folder, options)
    assert "with KEY set to a key: curl" in text and '"Authorization: Bearer $KEY"' in text
    assert "KEY" not in shown(folder)


def test_without_a_compiler_the_start_says_what_the_doctor_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if packaged_library(runnable_variants()[0]) is not None:
        pytest.skip("the kernels came with the package")
    for name in ("CXX", "HEADSTART_KERNELS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    headstart = [sys.executable, "-m", "headstart"]
    with spawn([*headstart, "serve", "--port", "0", "--num-blocks", "64"], tmp_path / "log") as server:
        server.wait_ready()
        said = re.search(
            r"^Headstart has no CPU kernels here: (none: .*); torch is slower \(headstart doctor\)$", server.log, re.M
        )
        assert said is not None, server.log
        assert server.log.index(said[0]) < server.log.index("  try ")
        assert server.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
    assert "no C++ compiler (g++, c++, clang++) on the path: install g++" in said[1]
    doctor = subprocess.run([*headstart, "doctor"], capture_output=True, text=True, timeout=PATIENCE)
    assert re.search(rf"^  CPU kernels +{re.escape(said[1])}$", doctor.stdout, re.M), doctor.stdout
