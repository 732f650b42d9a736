"""The commands of the pages, run in their order, block by block: servers answer, other commands end with code 0.

Addresses, ports and models are replaced by ones of this machine. What cannot run here is in `NOT_RUN`, with the reason.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import pytest
from server.harness import quiet_port, wait_for

from headstart.bundled.packaged_models import find_packaged_model_file
from headstart.model.weights.init_model import write_random_model

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
OTHER_PAGES = {
    "architecture.md": "has no commands",
    "benchmarks.md": "minutes each, on a quiet machine; their parsers: test_docs.py",
    "clients.md": "tests/clients",
    "deploy/compose.md": "no Docker here: tests/deploy",
    "deploy/envoy.md": "tests/gateway, with Envoy",
    "deploy/kubernetes.md": "no cluster here: tests/deploy",
    "deploy/ray.md": "tests/gateway, with Ray",
    "install.md": "installs; CI does it in test_make.py and deploy",
    "plugins.md": "installs",
    "plugins-vllm.md": "vLLM is not installed",
    "simulation.md": "recorded traces are not in the repository; tests/sim has smaller ones",
}
NOT_RUN = {
    r"pip install": "installs",
    r"cline|aider": "another program: tests/clients/test_agent_clis.py",
    r"redis://": "no Redis: tests/server/test_redis_servers.py",
    r"--device cuda": "needs a GPU",
    r"kubernetes:": "no cluster",
}
PORTS = (8000, 9000)
NEEDS_SERVER = re.compile(r"headstart (explain|prefix|top --once$|top$)|127\.0\.0\.1:8000")
EXPLAINED = "cmpl-2d50d99e9b6b444d9e36ccd2a26f1dfb"
LIMITS = "--num-blocks 1024 --heartbeat-timeout 600"
SECONDS = 900.0

pytestmark = pytest.mark.long


def pages() -> list[Path]:
    return [page for page in sorted(DOCS.rglob("*.md")) if page.relative_to(DOCS).as_posix() not in OTHER_PAGES]


def blocks(page: Path) -> list[list[str]]:
    """Return the commands of each shell block, without comments, continued lines joined."""
    found = re.findall(r"^```(?:bash|sh)\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    lines = (re.sub(r"\\\n", " ", block).splitlines() for block in found)
    return [[stripped for line in block if (stripped := re.split(r"(?:^|\s+)#\s", line)[0].strip())] for block in lines]


BLOCKS = [
    pytest.param(block, id=f"{page.relative_to(DOCS).as_posix()}-{number}")
    for page in pages()
    for number, block in enumerate(blocks(page), 1)
]


class Shell:
    """A folder with what the commands name, and the servers that they have started."""

    def __init__(self, folder: Path, tiny: Path, replicas: list[str]) -> None:
        self.folder = folder
        self.ports = {port: quiet_port() for port in PORTS}
        self._replicas = replicas
        self._servers: dict[int, subprocess.Popen[bytes]] = {}
        (folder / "examples").symlink_to(ROOT / "examples")
        (folder / "tiny").symlink_to(tiny)
        (folder / "replicas.txt").write_text("\n".join(replicas))
        bodies = ({"messages": [{"role": "user", "content": f"{day}: what is new?"}]} for day in range(3))
        (folder / "requests.jsonl").write_text("\n".join(map(json.dumps, bodies)))
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
        source = os.pathsep.join(str(ROOT / name) for name in ("src", "lab/src"))
        cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        own = {"PATH": path, "PYTHONPATH": source, "HOME": str(folder), "XDG_CACHE_HOME": cache}
        self._environment = {**os.environ, **own}

    def run(self, command: str) -> None:
        """Run a command; one that serves goes on in the background, in the place of what has its port."""
        words = self._here(command)
        if re.search(r"headstart (serve|route)\b", command):
            self._serve(words)
            return
        if NEEDS_SERVER.search(command) and self.ports[8000] not in self._servers:
            self._serve(self._here("headstart serve --prompt-log-size 16777216"))
        if EXPLAINED in words:
            words = words.replace(EXPLAINED, self._completion())
        done = subprocess.run(
            ["bash", "-ec", words],
            cwd=self.folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        assert done.returncode == 0, f"{words}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        if words.startswith("curl"):
            assert done.stdout.strip() and '"error":{' not in done.stdout.replace(" ", ""), f"{words}\n{done.stdout}"

    def close(self) -> None:
        for port in list(self._servers):
            self._stop(port)

    def _here(self, command: str) -> str:
        text = re.sub(r"(?<![\w./-])(Qwen/Qwen3-[\d.]+B|\./my-model|my-model|MODEL)(?![\w/-])", "./tiny", command)
        for number, url in enumerate(self._replicas, 7):
            text = text.replace(f"http://10.0.0.{number}:8000", url)
        for known, port in self.ports.items():
            text = re.sub(rf"(127\.0\.0\.1:|localhost:|--port ){known}\b", rf"\g<1>{port}", text)
        url = f"http://127.0.0.1:{self.ports[8000]}"
        if re.match(r"headstart (explain|prefix|top)\b", text) and "--url" not in text:
            text += f" --url {url}"
        if "intent/client.py" in text:
            text += f" --base-url {url}/v1"
        if re.search(r"headstart (serve|route)\b", text) and "--port" not in text:
            text += f" --port {self.ports[8000]}"
        return f"{text} {LIMITS}" if "headstart serve" in text else text

    def _serve(self, words: str) -> None:
        found = re.search(r"--port (\d+)", words)
        assert found is not None
        port = int(found[1])
        self._stop(port)
        log = self.folder / f"log-{port}"
        with log.open("wb") as output:
            arguments = ["bash", "-ec", re.sub(r"(^|\s)headstart ", r"\1exec headstart ", words, count=1)]
            process = subprocess.Popen(
                arguments,
                cwd=self.folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        self._servers[port] = process
        wait_for(lambda: process.poll() is not None or self._is_ready(port))
        assert process.poll() is None, f"{words}\n{log.read_text()[-3000:]}"

    def _is_ready(self, port: int) -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
        except httpx.HTTPError:
            return False

    def _stop(self, port: int) -> None:
        process = self._servers.pop(port, None)
        if process is not None:
            process.send_signal(signal.SIGTERM)
            process.wait(SECONDS)

    def _completion(self) -> str:
        url = f"http://127.0.0.1:{self.ports[8000]}/v1/completions"
        return str(httpx.post(url, json={"prompt": "A book", "max_tokens": 1}, timeout=SECONDS).json()["id"])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that takes prompts of any length that a page names, with random weights."""
    model = write_random_model(
        "tiny", tmp_path_factory.mktemp("model") / "tiny", std=0.2, dtype="float32", progress=False
    )
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_position_embeddings": 65_536}))
    return model


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Iterator[list[str]]:
    """The addresses of two servers, for the replicas that pages name."""
    with ExitStack() as stack:
        urls: list[str] = []
        for name in ("one", "two"):
            shell = stack.enter_context(closing(Shell(tmp_path_factory.mktemp(name), tiny, [])))
            shell.run("headstart serve MODEL")
            urls.append(f"http://127.0.0.1:{shell.ports[8000]}")
        yield urls


@pytest.mark.parametrize("block", BLOCKS)
def test_the_commands_of_a_block_run(block: list[str], tiny: Path, request: pytest.FixtureRequest) -> None:
    run = [command for command in block if not any(re.search(pattern, command) for pattern in NOT_RUN)]
    text = " ".join(run)
    if "smollm2" in text and find_packaged_model_file("smollm2-135m") is None:
        pytest.skip("smollm2-135m was not downloaded")
    replicas = request.getfixturevalue("replicas") if re.search(r"10\.0\.0\.|replicas\.txt", text) else []
    with TemporaryDirectory() as name, closing(Shell(Path(name), tiny, replicas)) as shell:  # a model of 1.2 GB is made
        for command in run:
            shell.run(command)


def test_what_is_not_run_is_on_a_page() -> None:
    commands = [command for page in pages() for block in blocks(page) for command in block]
    assert [pattern for pattern in NOT_RUN if not any(re.search(pattern, one) for one in commands)] == []
    assert [name for name in OTHER_PAGES if not (DOCS / name).is_file()] == []
    assert len(commands) > 60 and shutil.which("bash") is not None
