"""Both plug-ins in whole engines with random weights: vLLM's own counters, and the same tokens."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from vllm_environment import run_script

from headstart.model.weights.init_model import write_random_model

pytestmark = pytest.mark.long
COUNTER = "vllm:request_prefill_kv_computed_tokens"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "llama"
    write_random_model("llama-3m", folder, dtype="float32")
    return folder


def test_a_burst_behind_a_new_prefix_computes_it_once(model: Path) -> None:
    alone: Any = run_script("use_engine.py", str(model))
    ours: Any = run_script("use_engine.py", str(model), "headstart_plugins.vllm.Scheduler")
    assert alone["counters"][COUNTER] > 2.5 * alone["ideal"]
    assert ours["counters"][COUNTER] <= 1.05 * ours["ideal"]
    assert alone["tokens"] == ours["tokens"]


def test_a_killed_server_starts_again_with_its_blocks(model: Path, tmp_path: Path) -> None:
    run: list[Any] = [
        run_script("use_engine_store.py", str(model), str(tmp_path / "kv"), end, expect=status)
        for end, status in (("kill", -9), ("end", 0))
    ]
    first, second = run
    assert second["tokens"] == first["tokens"]
    assert second["counters"]["vllm:external_prefix_cache_hits"] >= 0.9 * first["prompt_tokens"]


def test_no_flipped_byte_changes_an_answer(model: Path, tmp_path: Path) -> None:
    run: Any = run_script("use_engine_store.py", str(model), str(tmp_path / "kv"), "flip", "60")
    assert run["wrong"] == 0 and run["misses"]["corrupt"] + run["misses"]["mismatch"] > 0
    assert run["store"]["loaded"] > 0


def test_two_engines_at_once_share_one_folder(model: Path, tmp_path: Path) -> None:
    arguments = "use_engine_store.py", str(model), str(tmp_path / "kv"), "end"
    with ThreadPoolExecutor(2) as pool:
        one, two = pool.map(lambda _: run_script(*arguments), range(2))
    third: Any = run_script(*arguments)
    assert one["tokens"] == two["tokens"] == third["tokens"]  # type: ignore[index]
    assert third["counters"]["vllm:external_prefix_cache_hits"] >= 0.9 * third["prompt_tokens"]
