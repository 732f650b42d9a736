"""Write the OpenVINO IR of a Hugging Face folder: `python openvino_ir.py FOLDER OUT`.

Runs in OpenVINO's own environment (package optimum-intel). The weights keep their type; left to itself the converter
quantizes those of models above a billion to int8. There is no tokenizer: benchmarks send and receive token ids.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path


def ensure_ir(folder: Path, out: Path) -> Path:
    """Write `out` unless it exists and is newer than the folder's config; return its path.

    The converter runs in a process of its own, so that torch and its threads are not in the caller's.
    """
    if not out.exists() or out.stat().st_mtime < (folder / "config.json").stat().st_mtime:
        subprocess.run([sys.executable, __file__, str(folder), str(out)], stdout=sys.stderr, check=True)
    return out


def write_ir(folder: Path, out: Path) -> None:
    """Write the folder `out` atomically: it is complete or does not exist."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from optimum.exporters.openvino import main_export  # imports torch and Transformers, only to convert
    from optimum.intel import OVConfig

    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        part = Path(scratch) / "model"
        plain = OVConfig(dtype="bf16")  # any type that is not of a quantization
        main_export(str(folder), part, task="text-generation-with-past", ov_config=plain, convert_tokenizer=False)
        shutil.rmtree(out, ignore_errors=True)
        part.replace(out)


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    write_ir(arguments.folder, arguments.out)


if __name__ == "__main__":
    main()
