"""Invariant 15: with the native kernels, no way to compute a prompt changes a bit of its log-probabilities."""

import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from exactness import FORMS, Ways, load_form, prompts_of
from model.tiny import HYBRIDS

from headstart.core.batch import Chunk, RowResult
from headstart.core.cache.block_store import Data
from headstart.model import model_runner
from headstart.model.kernels import library
from headstart.model.kernels.build import SOURCES
from headstart.model.layers.decoder import Decoder
from headstart.model.packed_kv import PackedKV
from headstart.model.sampling.sampler import Sampler
from headstart.model.step_inputs import build_step_inputs

pytestmark = pytest.mark.skipif(library.kernel_library_in_use() is None, reason="no compiled kernels here")
RUNNABLE = library.runnable_variants()


@pytest.mark.parametrize("form", FORMS)
def test_no_way_to_compute_a_prompt_changes_a_bit(form: str, tmp_path: Path) -> None:
    loaded = load_form(form, tmp_path)
    prompts = prompts_of(Random(1), 12, longest=900, vocab=loaded.vocab_size)
    found = Ways(loaded, prompts, num_tokens=6).differing()
    assert len(found) == 8 and not any(found.values()), found


@pytest.mark.parametrize("form", ["bfloat16", "float32"])
@pytest.mark.parametrize(("family", "settings"), [("qwen3", {"head_dim": 32}), ("mistral", {"sliding_window": 100})])
def test_norms_of_heads_and_windows_change_nothing(form: str, family: str, settings: dict, tmp_path: Path) -> None:
    loaded = load_form(form, tmp_path, family, **settings)
    prompts = prompts_of(Random(2), 6, longest=300, vocab=loaded.vocab_size)
    found = Ways(loaded, prompts, num_tokens=4).differing()
    assert not any(found.values()), found


@pytest.mark.parametrize("form", ["bfloat16", "float32", "int8", "int4"])
@pytest.mark.parametrize("family", HYBRIDS)
def test_recurrent_layers_change_nothing(form: str, family: str, tmp_path: Path) -> None:
    loaded = load_form(form, tmp_path, family)
    assert loaded.state_bytes and not loaded.exceptions
    found = Ways(loaded, prompts_of(Random(3), 6, longest=200, vocab=loaded.vocab_size), num_tokens=4).differing()
    assert len(found) == 8 and not any(found.values()), found


# ---- planted bugs ----------------------------------------------------------------------------------------------------

Patch = pytest.MonkeyPatch


def scaled_logits(patch: Patch, applies: Callable[[torch.Tensor], bool]) -> None:
    """Plant a small error in the logits of steps for which `applies(rows)`."""
    right = Decoder.logits_from_hidden

    def logits(self: Decoder, hidden: torch.Tensor) -> torch.Tensor:
        found = right(self, hidden)
        return found * (1 + 2**-7) if applies(hidden) else found

    patch.setattr(Decoder, "logits_from_hidden", logits)


def rows_depend_on_their_number(patch: Patch) -> None:
    scaled_logits(patch, lambda rows: len(rows) > 1)


def threads_change_a_row(patch: Patch) -> None:
    scaled_logits(patch, lambda rows: torch.get_num_threads() == 3)


def a_hit_is_read_one_position_off(patch: Patch) -> None:
    def build(*arguments: object) -> tuple:
        step, *rest = build_step_inputs(*arguments)
        lengths = np.diff(step.qo_indptr)
        late = np.repeat((step.starts > 0) & (lengths > 1), lengths)  # the rest of a prompt, not a decode
        return replace(step, positions=step.positions + torch.from_numpy(late.astype(np.int64))), *rest

    patch.setattr(model_runner, "build_step_inputs", build)


def drafts_are_verified_by_other_logits(patch: Patch) -> None:
    right = Sampler.sample

    def sample(self: Sampler, logits: torch.Tensor, chunks: Sequence[Chunk]) -> list[RowResult]:
        return right(self, logits * (1 + 2**-7) if len(logits) > len(chunks) else logits, chunks)

    patch.setattr(Sampler, "sample", sample)


def a_restored_block_has_another_bit(patch: Patch) -> None:
    right = PackedKV.write_block

    def write_block(self: PackedKV, block_id: int, data: Data) -> None:
        changed = bytearray(data)
        changed[1] ^= 1  # of the first number of the first key, in its exponent
        right(self, block_id, changed)

    patch.setattr(PackedKV, "write_block", write_block)


@pytest.mark.parametrize(
    ("bug", "seen_by"),
    [
        (rows_depend_on_their_number, {"batched", "batched_apart", "repeated", "chunked", "drafted", "restored"}),
        (threads_change_a_row, {"threaded"}),
        (a_hit_is_read_one_position_off, {"cached", "batched", "chunked"}),
        (drafts_are_verified_by_other_logits, {"drafted"}),
        (a_restored_block_has_another_bit, {"restored"}),
    ],
)
@pytest.mark.parametrize("form", ["bfloat16", "float32"])
def test_a_planted_bug_is_seen(
    form: str, bug: Callable[[Patch], None], seen_by: set[str], tmp_path: Path, monkeypatch: Patch
) -> None:
    loaded = load_form(form, tmp_path)
    prompts = prompts_of(Random(3), 6, longest=150, vocab=loaded.vocab_size)
    bug(monkeypatch)
    ways = Ways(loaded, prompts, num_tokens=5)
    due = ways.cold()
    for name in seen_by:
        assert ways.others[name]() != due, name


# ---- the long form ---------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("variant", RUNNABLE)
def test_300_prompts_have_the_same_bits_in_every_form(
    variant: str, form: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setenv(library.VARIABLE, variant)
    loaded = load_form(form, tmp_path)
    total: Counter[str] = Counter()
    for seed in range(10):
        prompts = prompts_of(Random(100 + seed), 30, longest=900, vocab=loaded.vocab_size)
        total.update(Ways(loaded, prompts, num_tokens=8).differing())
    print(f"\n{variant} {form}: of 300 prompts differ {dict(total)}")
    assert len(total) == 8 and not any(total.values())


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_plan_that_cuts_segments_is_seen(tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    shutil.copytree(SOURCES, folder, ignore=shutil.ignore_patterns("__pycache__", "compiled"))
    right = (folder / "attention.h").read_text()
    first = "    while (block > 0 && segment_end("
    assert right.count(first) == 1
    (folder / "attention.h").write_text(right.replace(first, "    return block;\n" + first))
    script = (
        "import sys, pytest\nfrom pathlib import Path\nfrom headstart.model.kernels import build\n"
        "build.SOURCES, build.FLAGS = Path(sys.argv[1]), (*build.FLAGS, '-O1')\n"
        "of_one = ['-m', 'not long or long(of_a_variant=True)', '-k', 'avx2']\n"
        "sys.exit(pytest.main(['-x', '-p', 'no:cacheprovider', *of_one, sys.argv[2]]))"
    )
    own = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": os.pathsep.join(sys.path), library.VARIABLE: "avx2"}
    test = f"{Path(__file__).parent}/model/test_cpu_attention.py::test_no_plan_changes_a_bit"
    command = [sys.executable, "-c", script, str(folder), test]
    done = subprocess.run(
        command, env=os.environ | own, cwd=SOURCES.parents[3], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and "FAILED" in done.stdout, (done.stdout + done.stderr)[-2000:]
