"""Client libraries, each in an environment of its own, unmodified: python tests/clients/environments.py [NAME ...].

An environment is made on first use, from PyPI or npm, in the user's cache folder, and named after its requirements, so
that other versions get another one. Nothing is installed into the environment of the tests.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"
NO_NETWORK = re.compile(
    "NewConnectionError|ConnectTimeout|ReadTimeout|ProxyError|Connection refused|Network is unreachable|"
    "Name or service not known|name resolution|Retrying \\(Retry|ENOTFOUND|ECONNREFUSED|ETIMEDOUT|EAI_AGAIN|ENETUNREACH"
)
INSTALL_SECONDS = 1800


class UnreachableError(Exception):
    """The package index cannot be reached, or node is missing."""


@dataclass(frozen=True, slots=True)
class Client:
    """A client library, and the script that uses it."""

    name: str
    script: str
    requirements: tuple[str, ...]  # with exact versions

    @property
    def path(self) -> Path:
        """The script."""
        return SCRIPTS / self.script

    @property
    def is_npm(self) -> bool:
        """Whether it runs in Node.js."""
        return self.script.endswith(".mjs")

    def checks(self) -> list[str]:
        """Return the names of the script's checks, without running it."""
        pattern = r"^export async function (check\w+)" if self.is_npm else r"^(?:async )?def (check_\w+)"
        return re.findall(pattern, self.path.read_text(encoding="utf-8"), re.MULTILINE)


_AI_SDK = ("@ai-sdk/openai@4.0.118", "@ai-sdk/openai-compatible@3.0.92", "@ai-sdk/anthropic@4.0.105")
_LANGCHAIN = ("langchain==1.4.7", "langchain-openai==1.7.3", "langchain-anthropic==1.7.7")
CLIENTS = (
    Client("openai", "use_openai.py", ("openai==3.54.0",)),
    Client("anthropic", "use_anthropic.py", ("anthropic==2.12.0",)),
    Client("instructor", "use_instructor.py", ("instructor==1.17.0", "anthropic==2.12.0")),
    Client("pydantic-ai", "use_pydantic_ai.py", ("pydantic-ai-slim[openai,anthropic]==2.68.0",)),
    Client("openai-agents", "use_openai_agents.py", ("openai-agents==0.24.0",)),
    Client("langchain", "use_langchain.py", _LANGCHAIN),
    Client("litellm", "use_litellm.py", ("litellm==1.106.2", "mcp==2.3.0")),
    Client("ollama", "use_ollama.py", ("ollama==0.6.3",)),
    Client("smolagents", "use_smolagents.py", ("smolagents[openai]==1.26.0",)),
    Client("crewai", "use_crewai.py", ("crewai==1.15.30",)),
    Client("langgraph", "use_langgraph.py", ("langgraph==1.2.24", "langchain-openai==1.7.3")),
    Client("dspy", "use_dspy.py", ("dspy==3.4.1",)),
    Client("npm-openai", "use_openai.mjs", ("openai@7.57.0", "zod@4.6.7")),
    Client("npm-ai", "use_ai_sdk.mjs", ("ai@7.0.173", *_AI_SDK, "zod@4.6.7")),
)


@dataclass(frozen=True, slots=True)
class Program:
    """A program from npm or PyPI. `binary`: the pattern of its path; `skipped`: what an agent's prompts lack here."""

    name: str
    requirements: tuple[str, ...]
    binary: str
    skipped: tuple[str, ...] = ()
    is_npm: bool = True


AGENTS = (
    Program(
        "claude-code",
        ("@anthropic-ai/claude-code@2.1.197",),
        "node_modules/@anthropic-ai/claude-code-*/claude",
        ("field.context_management",),
    ),
    Program(
        "codex", ("@openai/codex@0.171.0",), "node_modules/@openai/codex-*/vendor/*/bin/codex", ("tool.web_search",)
    ),
    Program("opencode", ("opencode-ai@1.18.33",), "node_modules/opencode-linux-x64/bin/opencode"),
    Program("cline", ("cline@3.0.65",), "node_modules/@cline/cli-linux-x64/bin/cline"),
    Program("aider", ("aider-chat==0.86.2",), "bin/aider", is_npm=False),
)
PLAYWRIGHT = Program("playwright", ("playwright==1.65.2", "axe-playwright-python==0.1.8"), "", is_npm=False)
LM_EVAL = Program("lm-eval", ("lm-eval[api]==0.4.13", "transformers==5.24.0"), "bin/lm_eval", is_npm=False)


def command(client: Client) -> list[str]:
    """Return the command that runs the client's script, installing the client first. Raises UnreachableError."""
    folder = environment(client)
    if client.is_npm:
        return ["node", str(folder / client.script)]
    return [str(folder / "bin" / "python"), str(client.path)]


def environment(client: Client | Program) -> Path:
    """Return the folder of the client's environment, made on first use."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headstart" / "clients"
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    key = hashlib.sha256(json.dumps([client.requirements, python]).encode()).hexdigest()[:8]
    folder = cache / f"{client.name}-{key}"
    done = folder / ".complete"
    if not done.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)  # an install that was interrupted
        (_install_npm if client.is_npm else _install_python)(folder, client.requirements)
        done.touch()
    if client.is_npm:  # modules are looked up from the place of the script
        for script in SCRIPTS.glob("*.mjs"):
            shutil.copy(script, folder)
    return folder


def _install_python(folder: Path, requirements: tuple[str, ...]) -> None:
    _run([sys.executable, "-m", "venv", str(folder)], folder.parent)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _run([*pip, *requirements], folder)


def _install_npm(folder: Path, requirements: tuple[str, ...]) -> None:
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        raise UnreachableError("node and npm are not installed")
    folder.mkdir()
    (folder / "package.json").write_text('{"private": true, "type": "module"}\n', encoding="utf-8")
    _run([npm, "install", "--no-audit", "--no-fund", "--ignore-scripts", *requirements], folder)


def _run(words: list[str], folder: Path) -> None:
    with tempfile.TemporaryFile("w+") as log:
        done = subprocess.run(words, cwd=folder, stdout=log, stderr=log, timeout=INSTALL_SECONDS)
        log.seek(0)
        text = log.read()
    if done.returncode == 0:
        return
    if NO_NETWORK.search(text):
        raise UnreachableError(f"the package index cannot be reached: {text.strip().splitlines()[-1]}")
    raise RuntimeError(f"{' '.join(words)} failed:\n{text}")


if __name__ == "__main__":
    for chosen in (*CLIENTS, PLAYWRIGHT):
        if chosen.name in sys.argv[1:] or not sys.argv[1:]:
            print(environment(chosen))
