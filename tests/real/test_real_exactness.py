"""Invariant 15 on a published checkpoint: no way to compute a conversation changes a bit of its log-probabilities."""

from itertools import accumulate
from pathlib import Path

import pytest
from exactness import Ways
from real.chats import chats

from headstart.model.kernels import library
from headstart.model.weights.model_loader import load_model
from headstart.openai.tokenizer.tokenizer import Tokenizer

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(7200),
    pytest.mark.skipif(library.kernel_library_in_use() is None, reason="no compiled kernels here"),
]
LONGEST = 600  # tokens


@pytest.mark.parametrize("form", ["bfloat16", "int8", "int4", "float32"])
def test_conversations_have_the_same_bits_however_they_are_computed(form: str, smollm2: Path) -> None:
    dtype = "float32" if form == "float32" else "bfloat16"
    loaded = load_model(smollm2, device="cpu", dtype=dtype, quantization=form if form.startswith("int") else "none")
    tokenizer = Tokenizer.from_folder(smollm2)
    turns = [[tokenizer.encode(f"{message['role']}: {message['content']}\n") for message in chat] for chat in chats()]
    prompts = [
        prompt[:LONGEST].tolist() for chat in turns for prompt in accumulate(chat)
    ]  # each turn behind those before it
    found = Ways(loaded, prompts, num_tokens=8).differing()
    print(f"\n{library.find_kernels().note} {form}: of {len(prompts)} prompts differ {found}")
    assert len(found) == 8 and not any(found.values())
