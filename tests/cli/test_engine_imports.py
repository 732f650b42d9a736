"""The engine process leaves out the slowest imports that it has no use for."""

import subprocess
import sys
from pathlib import Path

from model.tiny import make_checkpoint

_RUN = """
import sys
from headstart.cli.build_engine import build_engine
from headstart.config.options import EngineOptions
for model in sys.argv[1:]:
    build_engine(EngineOptions(model=model, dtype="float32", max_model_len=64, kv_cache_memory="8MiB"))
    print("torch.distributed.tensor" in sys.modules)
"""


def test_a_native_model_is_loaded_without_distributed_tensors_and_others_load_after_it(tmp_path: Path) -> None:
    folders = [make_checkpoint(family, tmp_path / family) for family in ("llama", "gpt_oss")]
    done = subprocess.run([sys.executable, "-c", _RUN, *folders], capture_output=True, text=True, timeout=300)
    assert done.stdout.split()[0] == "False", done.stdout + done.stderr
    assert done.returncode == 0, done.stderr
