"""Invariant 14: with the native kernels, no way to compute a prompt changes a bit of its log-probabilities."""

from pathlib import Path
from random import Random

import pytest
from exactness import FORMS, Ways, load_form, prompts_of

from headstart.model.kernels import library

pytestmark = pytest.mark.skipif(library.kernels() is None, reason="no compiled kernels here")
RUNNABLE = [name for name, needed in library.NEEDED.items() if needed <= library.cpu_flags()]


@pytest.mark.parametrize("form", [form for form in FORMS if form != "float32"])
def test_no_way_to_compute_a_prompt_changes_a_bit(form: str, tmp_path: Path) -> None:
    loaded = load_form(form, tmp_path)
    prompts = prompts_of(Random(1), 12, longest=900, vocab=loaded.vocab_size)
    found = Ways(loaded, prompts, num_tokens=6).differing()
    assert len(found) == 8 and not any(found.values()), found
