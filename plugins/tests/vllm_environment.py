"""The environment with vLLM that the plug-in's tests use, and the scripts that run in it.

HEADSTART_VLLM_ENV names one; otherwise `benchmarks/peers/setup.sh vllm` makes one in the user's cache folder on first
use. Headstart and the plug-ins are found by PYTHONPATH, so nothing of them is installed into it.
"""

import json
import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "vllm_scripts"
VARIABLE = "HEADSTART_VLLM_ENV"
ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
SECONDS = 1800


def vllm_python() -> Path:
    """Return the interpreter of the environment. Raises AssertionError if it cannot be made."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named) / "bin" / "python"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headstart" / "peers"
    done = cache / "vllm" / ".complete"
    if not done.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        command = ["sh", str(ROOT / "benchmarks/peers/setup.sh"), "vllm", str(cache)]
        made = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        assert not made.returncode, (
            f"no environment with vLLM could be made; {VARIABLE} names one: {made.stderr[-300:]}"
        )
        pip = [
            str(cache / "vllm" / "bin" / "python"),
            "-m",
            "pip",
            "install",
            "--quiet",
            "xxhash",
            "redis",
            "cryptography",
        ]
        subprocess.run(pip, check=True, timeout=SECONDS)  # of Headstart's requirements those that vLLM lacks
        done.touch()
    return cache / "vllm" / "bin" / "python"


def run_script(name: str, *arguments: str, expect: int = 0) -> object:
    """Run a script in the environment and return the JSON of its last line; `expect`: its exit status."""
    paths = [str(ROOT / folder / "src") for folder in (".", "plugins")] + [str(SCRIPTS)]
    done = subprocess.run(
        [str(vllm_python()), str(SCRIPTS / name), *arguments],
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == expect, f"{name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return json.loads(done.stdout.strip().splitlines()[-1])
