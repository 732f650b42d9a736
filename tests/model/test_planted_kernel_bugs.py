"""Bugs planted in the kernels of products and recurrent layers, one at a time: their tests catch each."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from headstart.model.kernels import library
from headstart.model.kernels.build import SOURCES

TESTS = Path(__file__).parents[1]
# name -> file, the code that is replaced, and the bug
BUGS = {
    "offset": ("group_sums.h", "set(-OFFSET * sum)", "set(-(OFFSET - 1) * sum)"),
    "offset_of_bytes": ("group_sums.h", "set(-OFFSET * row_sum", "set((1 - OFFSET) * row_sum"),
    "lost_loops": ("group_sums.h", "else whole[r][c].add(total)", "else whole[r][c] = total"),
    "order_of_bytes": ("group_rows.h", "_mm_setr_epi8(0, 4, 1, 5,", "_mm_setr_epi8(0, 4, 5, 1,"),
    "sixth_bit": ("words.h", ", 0x3000)", ", 0x1000)"),
    "lost_piece": ("groups.h", "value = Floats::load(out); }", "value.begin(out); }"),
    "fifth_bit_of_half": ("words.h", "high = Words::load(at + (8 + half) * SIZE)", "high = Words::load(at + 8 * SIZE)"),
    "scale_of_six_bits": ("pack_blocks.cpp", "(from[8 + i] & 15) | (from[i] >> 6) << 4", "from[8 + i] & 15"),
    "second_scale": ("groups.h", "from_signed_bytes(at + part * TILE", "from_signed_bytes(at + 0 * TILE"),
    "lost_section": ("dot.h", "{ *this = load(paused); }", "{ begin(nullptr); }"),
    "last_section_only": ("tiles.h", "k == begin, k + units == end", "k + units == end, k + units == end"),
    "not_finite": ("group_rows.h", "poison != 0 ? Scaling{0.0f, NAN} : ", ""),
    "lost_decay": ("recurrent.cpp", "mul(decay, add(even[v], odd[v]))", "add(even[v], odd[v])"),
    "late_state": ("recurrent.cpp", "save->at == at + 1 - chunk.begin", "save->at == at - chunk.begin"),
    "late_inputs": ("recurrent.cpp", "save->at == row + 1 - chunk.begin", "save->at == row - chunk.begin"),
    "lost_input": ("recurrent.cpp", "some(at + width, count) : input", "some(at + width, count) : sum"),
    "wrong_key_head": ("recurrent.cpp", "head / (layer.heads / layer.key_heads)", "head % layer.key_heads"),
    "lost_skip": ("recurrent.cpp", "IS_DELTA ? sum : fma(all(layer.skip[head]), seen[v], sum)", "sum"),
    "first_of_chunk": (
        "recurrent.cpp",
        "decay = all(decays[head])",
        "decay = all(at > chunk.begin ? decays[head] : 1)",
    ),
}
SCRIPT = """
import sys
from pathlib import Path
import pytest
from headstart.model.kernels import build
build.SOURCES, build.FLAGS = Path(sys.argv[1]), (*build.FLAGS, "-O1")
of_one = ["-m", "not long or long(of_a_variant=True)", "-k", sys.argv[2]]
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *of_one, *sys.argv[3:]]))
"""


def run(folder: Path, variant: str, names: Iterable[str]) -> subprocess.CompletedProcess[str]:
    """Run the tests of one variant in files `names` on kernels from the sources in `folder`."""
    environ = os.environ | {"XDG_CACHE_HOME": str(folder / "cache"), "PYTHONPATH": os.pathsep.join(sys.path)}
    files = [str(TESTS / "model" / name) for name in names]
    command = [sys.executable, "-c", SCRIPT, str(folder), variant, *files]
    return subprocess.run(command, env=environ, cwd=TESTS.parent, capture_output=True, text=True, timeout=850)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("bug", ["", *BUGS])
def test_planted_bug_is_caught(bug: str, tmp_path: Path) -> None:
    found = library.kernel_library_in_use()
    if found is None:
        pytest.skip("no compiled kernels here")
    folder = tmp_path / "kernels"
    shutil.copytree(SOURCES, folder, ignore=shutil.ignore_patterns("__pycache__", "compiled"))
    names = ["test_recurrent.py", "test_blocks_linear.py", "test_linear.py"]
    if bug:
        name, code, planted = BUGS[bug]
        text = (folder / name).read_text()
        assert text.count(code) == 1, f"{bug}: {name} has {text.count(code)} places like this"
        (folder / name).write_text(text.replace(code, planted))
        names = names[:1] if name == "recurrent.cpp" else names[1:]
    done = run(folder, "avx2", names)  # every machine with kernels can run it, and it compiles fastest
    assert list((folder / "cache").rglob("*.so")), (done.stdout + done.stderr)[-2000:]
    assert done.returncode == (1 if bug else 0), (done.stdout + done.stderr)[-2000:]
    assert ("FAILED" in done.stdout) == bool(bug), done.stdout[-2000:]
