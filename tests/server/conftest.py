"""Servers shared by the tests of a file."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizer_folders
from server.fake_engine import Gate
from server.harness import Server, fake_server, spawn

from headstart.model.weights.init_model import write_random_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model folder with a tokenizer and nothing else: all that a fake engine needs."""
    return str(tokenizer_folders.write(tmp_path_factory.mktemp("fake") / "model", tokenizer_folders.BYTE_LEVEL))


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    """Closed: what is held stays held."""
    return Gate(tmp_path / "gate")


@pytest.fixture(scope="module")
def server(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A running server around a fake engine that repeats its prompt."""
    log: Path = tmp_path_factory.mktemp("server") / "log"
    with fake_server(f"{folder}?step=0.001", log) as running:
        yield running


@pytest.fixture(scope="session")
def real_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`headstart serve` as users run it, truly started: the command line, the real engine, a tiny random model."""
    room = tmp_path_factory.mktemp("real")
    model = write_random_model("tiny", room / "tiny", std=0.2, dtype="float32", progress=False)
    sizes = ["--num-blocks", "512", "--max-model-len", "1024"]
    options = ["--port", "0", *sizes, "--heartbeat-timeout", "600"]  # other processes may use all cores for a while
    with spawn([sys.executable, "-m", "headstart", "serve", str(model), *options], room / "log", truly=True) as running:
        yield running.wait_ready()
