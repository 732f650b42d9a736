"""vLLM's own tests of its tiering manager, with HeadstartTier in the place of the example tier.

    PYTHONPATH=src:plugins/src python benchmarks/plugins/vllm_tier_tests.py SOURCES > vllm_tier_tests.json

Runs in the environment of vllm_core_tests.py, on the same sources; a plug-in of pytest too. The last line is JSON.
"""

import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

TESTS = "tests/v1/kv_offload/tiering/test_tiering_offloading.py"


def pytest_configure() -> None:
    """Put HeadstartTier in the place of vLLM's, before a test imports it."""
    if os.environ["HEADSTART_FORM"] == "vllm":
        return
    import numpy as np
    from vllm.v1.kv_offload import config
    from vllm.v1.kv_offload.base import LookupResult
    from vllm.v1.kv_offload.tiering.example import manager as example

    from headstart_plugins.vllm import tier as ours

    def spec(folder: Path) -> Any:
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"w")
        one = dict.fromkeys(("rank", "data_parallel_index"), 0) | {"data_parallel_rank_local": None}
        sizes = dict.fromkeys(("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size", "data_parallel_size"), 1)
        return SimpleNamespace(
            config=config.OffloadingConfig(
                groups=(),
                worker_kv_bytes_per_block=0,
                enable_kv_cache_events=False,
                extra_config={},
                engine_id="test",
                model=config.OffloadingModelConfig(str(folder), "float32"),
                cache=config.OffloadingCacheConfig(16, 1),
                parallel=config.OffloadingParallelConfig(**one, **sizes, is_parallelism_agnostic=False),
            )
        )

    class Planted(dict[Any, Any]):
        """The dict of chunks of vLLM's example tier, into which its tests write."""

        def __init__(self, tier: Any) -> None:
            super().__init__()
            self.tier = tier

        def __setitem__(self, key: Any, value: Any) -> None:
            super().__setitem__(key, value)
            content = np.zeros(self.tier.block_size_bytes, dtype=np.uint8).tobytes()
            self.tier._store.offer(self.tier._staged.stage(content), 0, ours._identity(key))
            self.tier.settle()

    class Tier(ours.HeadstartTier):
        """Ours, whose jobs end in the call that submits them."""

        def __init__(self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, **options: Any) -> None:
            self._room = tempfile.TemporaryDirectory()
            room = Path(self._room.name)
            super().__init__(spec(room), primary_kv_view, tier_type, None, folder=str(room / "kv"), size="512MiB")
            self.chunks, self.completed_jobs = Planted(self), self._finished

        def settle(self) -> None:
            self._jobs.join()
            until = time.monotonic() + 60
            while self._store.stats().num_pending and time.monotonic() < until:
                time.sleep(0.001)

        def submit_store(self, job_metadata: Any) -> None:
            dict.update(self.chunks, dict.fromkeys(job_metadata.keys, True))
            super().submit_store(job_metadata)
            self.settle()

        def submit_load(self, job_metadata: Any) -> None:
            super().submit_load(job_metadata)
            self.settle()

        def get_num_chunks(self) -> int:
            return sum(self.lookup(key, None) is LookupResult.HIT for key in self.chunks)

    example.ExampleSecondaryTierManager = Tier


def main() -> None:
    from vllm_core_tests import outcomes

    [sources] = map(Path, sys.argv[1:])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(sources / "tests", folder / "tests")
        shutil.copy(sources / "pyproject.toml", folder)
        alone, ours = (outcomes(folder, form, [TESTS], Path(__file__).stem) for form in ("vllm", "ours"))
    passed = [test for test, how in alone.items() if how == "passed"]
    differ = {test: ours.get(test, "not run") for test in passed if ours.get(test) != "passed"}
    print(json.dumps({"bench": "vllm tier tests", "passed": len(passed), "not with ours": differ}))


if __name__ == "__main__":
    main()
