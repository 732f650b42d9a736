"""Vocabularies of published models: tokens of GGUF tokenizers equal those of the original tokenizers.

llama.cpp's repository has vocabularies as GGUF files (models/ggml-vocab-*.gguf), texts (.inp), and the tokens that the
models' own tokenizers give for these texts (.out). The source distribution of llama-cpp-python carries them; pip
downloads it once, and the vocabularies are kept in the user's cache folder.
"""

import os
import tarfile
import tempfile
from pathlib import Path

import pytest
import tokenizers
from real.smollm2 import UnreachableError, pip

from headstart.gguf.tokenizer_json import read_tokenizer_json

PACKAGE, VERSION = "llama_cpp_python", "0.3.36"
NAMES = ("gpt-2", "llama-bpe", "llama-spm", "phi-3", "qwen2", "refact", "starcoder")
SEPARATOR = "\n__ggml_vocab_test__\n"

pytestmark = pytest.mark.long


@pytest.fixture(scope="session")
def vocabularies() -> Path:
    """The folder of the files. Skips only if the package index cannot be reached and nothing is cached."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headstart" / f"vocabularies-{VERSION}"
    if not cache.is_dir():
        cache.parent.mkdir(parents=True, exist_ok=True)
        try:
            _download(cache)
        except UnreachableError as error:
            pytest.skip(str(error))
    return cache


def _download(folder: Path) -> None:
    """Fill `folder`, which appears when it is complete."""
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making-") as scratch:
        pip("download", "--no-deps", "--no-binary", ":all:", "--dest", scratch, f"{PACKAGE}=={VERSION}")
        made = Path(scratch) / "vocabularies"
        made.mkdir()
        with tarfile.open(next(Path(scratch).glob("*.tar.gz"))) as source:
            for member in source:
                name = Path(member.name).name
                if member.isfile() and "/llama.cpp/models/ggml-vocab-" in member.name:
                    stream = source.extractfile(member)
                    assert stream is not None
                    (made / name).write_bytes(stream.read())
        made.rename(folder)


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_the_original_tokenizer(name: str, vocabularies: Path) -> None:
    path = vocabularies / f"ggml-vocab-{name}.gguf"
    document = read_tokenizer_json(path)
    assert document is not None
    ours = tokenizers.Tokenizer.from_str(document)
    texts = path.with_name(f"{path.name}.inp").read_text(encoding="utf-8").split(SEPARATOR)
    lines = path.with_name(f"{path.name}.out").read_text(encoding="utf-8").splitlines()
    assert len(lines) > 40 and len(texts) - len(lines) in (0, 1)
    for text, line in zip(texts, lines, strict=False):
        assert ours.encode(text, add_special_tokens=False).ids == [int(token) for token in line.split()], text
