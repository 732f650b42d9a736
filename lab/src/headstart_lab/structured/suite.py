"""The JSON-Schema-Test-Suite, from the source distribution of `jsonschema` on PyPI, which contains it.

`fetch_suite` downloads the archive with pip into the user's cache, once. Nothing of it is kept in this repository.
"""

import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema_rs

VERSION = "4.26.0"  # of jsonschema
DRAFTS = ("draft2020-12", "draft7")
VALIDATORS = {"draft2020-12": jsonschema_rs.Draft202012Validator, "draft7": jsonschema_rs.Draft7Validator}
REMOTE = "http://localhost:1234/"  # where the suite's schemas expect the files of its folder `remotes`


class Instance(NamedTuple):
    """A JSON value, and whether it satisfies the schema by the standard."""

    description: str
    data: Any
    valid: bool


class SuiteSchema(NamedTuple):
    """A schema of the suite; `keyword` is the name of its file, the keyword that it is about."""

    draft: str
    keyword: str
    description: str
    schema: Any
    instances: tuple[Instance, ...]

    @property
    def name(self) -> str:
        return f"{self.draft}/{self.keyword}: {self.description}"


def cache_folder() -> Path:
    """Return the folder that the archive is kept in."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headstart" / "json-schema-test-suite"


def fetch_suite(cache: Path | None = None) -> Path:
    """Return the folder with `tests` and `remotes`, downloaded on first use; raises CalledProcessError without PyPI."""
    folder = (cache or cache_folder()) / VERSION
    if folder.is_dir():
        return folder / "json"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--no-binary", ":all:", "--dest", scratch, f"jsonschema=={VERSION}"]
        subprocess.run(command, check=True, capture_output=True)
        with tarfile.open(next(Path(scratch).glob("*.tar.gz"))) as archive:
            archive.extractall(scratch, filter="data")
        unpacked = next(path for path in Path(scratch).iterdir() if path.is_dir())
        try:
            unpacked.rename(folder)
        except OSError:  # another process was faster
            if not folder.is_dir():
                raise
    return folder / "json"


def read_suite(folder: Path, draft: str) -> Iterator[SuiteSchema]:
    """Yield every schema of a draft: the required ones, the optional ones, and the optional ones about formats."""
    for prefix, place in (("", "."), ("optional ", "optional"), ("format ", "optional/format")):
        for file in sorted((folder / "tests" / draft / place).glob("*.json")):
            yield from _read_file(file, draft, prefix + file.stem)


def _read_file(file: Path, draft: str, keyword: str) -> Iterator[SuiteSchema]:
    for group in json.loads(file.read_text(encoding="utf-8")):
        instances = tuple(Instance(t["description"], t["data"], t["valid"]) for t in group["tests"])
        yield SuiteSchema(draft, keyword, group["description"], group["schema"], instances)


def validator(draft: str, schema: Any, folder: Path) -> Any:
    """Return a validator that checks formats and reads the suite's remote files from disk; it opens no socket."""

    def retrieve(uri: str) -> Any:
        if not uri.startswith(REMOTE):
            raise ValueError(f"no remote schema {uri}")
        return json.loads((folder / "remotes" / uri.removeprefix(REMOTE)).read_text(encoding="utf-8"))

    return VALIDATORS[draft](schema, validate_formats=True, retriever=retrieve)


def integral(value: Any) -> Any:
    """Return a JSON value with integral floats, such as 2.0, as integers."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [integral(item) for item in value]
    return {name: integral(item) for name, item in value.items()} if isinstance(value, dict) else value
