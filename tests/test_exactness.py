"""Invariant 15: with the native kernels, no way to compute a prompt changes a bit of its log-probabilities."""

from pathlib import Path
from random import Random

import pytest
from exactness import FORMS, Ways, load_form, prompts_of

from headstart.model.kernels import library

pytestmark = pytest.mark.skipif(library.kernels() is None, reason="no compiled kernels here")
RUNNABLE = [name for name, needed in library.NEEDED.items() if needed <= library.cpu_flags()]


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
