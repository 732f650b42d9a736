"""The digest of kernels and model code: changed code changes it, changed comments and docstrings do not."""

from pathlib import Path

import pytest
from model.tiny import make_checkpoint

from headstart.model.source_digest import source_digest
from headstart.model.weights import model_loader as loader

PYTHON = '''"""Module."""
SCALE = 2.0  # a factor


def twice(x: float) -> float:
    """Double."""
    return SCALE * x
'''
CPP = """#define WIDTH 8  // lanes
/* block
 comment */
const char* url = "http://x";  // not a comment
int f() { return 0x1'000; }
"""


def digest_of(folder: Path, python: str = PYTHON, cpp: str = CPP, header: str = "int g();\n") -> bytes:
    kernels = folder / "kernels"
    kernels.mkdir(parents=True)
    (folder / "model.py").write_text(python)
    (kernels / "step.cpp").write_text(cpp)
    (kernels / "step.h").write_text(header)
    return source_digest(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"python": PYTHON.replace("2.0", "2.5")},
        {"python": PYTHON.replace("SCALE * x", "x * SCALE")},
        {"cpp": CPP.replace("WIDTH 8", "WIDTH 16")},
        {"cpp": CPP.replace("http://x", "http://y")},
        {"cpp": CPP.replace("0x1'000", "0x2'000")},
        {"header": "long g();\n"},
    ],
)
def test_changed_code_changes_the_digest(change: dict[str, str], tmp_path: Path) -> None:
    assert digest_of(tmp_path / "changed", **change) != digest_of(tmp_path / "original")


@pytest.mark.parametrize(
    "change",
    [
        {"python": PYTHON.replace("a factor", "another")},
        {"python": PYTHON.replace('"""Double."""', '"""Return twice `x`."""')},
        {"python": PYTHON.replace('"""Module."""\n', "")},
        {"cpp": CPP.replace("lanes", "lanes of a register")},
        {"cpp": CPP.replace("block\n comment", "other")},
        {"cpp": CPP.replace("not a comment", 'say "no')},
        {"header": "// declares g\nint g();   \n\n"},
    ],
)
def test_changed_comments_docstrings_and_layout_do_not(change: dict[str, str], tmp_path: Path) -> None:
    assert digest_of(tmp_path / "changed", **change) == digest_of(tmp_path / "original")


def test_files_that_are_moved_or_added_change_the_digest(tmp_path: Path) -> None:
    original = digest_of(tmp_path / "original")
    digest_of(tmp_path / "moved")
    (tmp_path / "moved" / "model.py").rename(tmp_path / "moved" / "other.py")
    source_digest.cache_clear()
    assert source_digest(tmp_path / "moved") != original
    digest_of(tmp_path / "added")
    (tmp_path / "added" / "more.py").write_text("")
    source_digest.cache_clear()
    assert source_digest(tmp_path / "added") != original


def test_the_digest_is_part_of_a_models_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_checkpoint("llama", tmp_path)
    first = loader.load_model(folder, dtype="float32", device="cpu").fingerprint
    monkeypatch.setattr(loader, "source_digest", lambda: b"other code")
    assert loader.load_model(folder, dtype="float32", device="cpu").fingerprint != first
