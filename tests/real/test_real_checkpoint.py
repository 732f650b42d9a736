"""A published checkpoint, SmolLM2-135M-Instruct: tokens, chat template and greedy output equal Transformers'."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from real.chats import Chat, chats
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from headstart import LLM
from headstart.openai.tokenizer.tokenizer import Tokenizer

pytestmark = pytest.mark.long

MAX_TOKENS = 32
GREEDY = {"temperature": 0, "max_tokens": MAX_TOKENS}


@pytest.fixture(scope="module")
def oracle_tokenizer(smollm2: Path) -> Any:
    return AutoTokenizer.from_pretrained(smollm2)


@pytest.fixture(scope="module")
def oracle(smollm2: Path) -> PreTrainedModel:
    """Transformers' own eager code in float32."""
    return AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32, attn_implementation="eager").eval()


def prompt_of(tokenizer: Any, chat: Chat) -> list[int]:
    """The token ids that Transformers makes of a conversation."""
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)


@pytest.fixture(scope="module")
def expected(oracle: PreTrainedModel, oracle_tokenizer: Any) -> list[list[int]]:
    """Transformers' greedy output of every conversation, one after the other."""
    outputs: list[list[int]] = []
    for chat in chats():
        prompt = prompt_of(oracle_tokenizer, chat)
        with torch.inference_mode():
            tokens = oracle.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=MAX_TOKENS,
                do_sample=False,
            )
        outputs.append(tokens[0, len(prompt) :].tolist())
    return outputs


def groups(order: list[int], rng: Random) -> Iterator[list[int]]:
    """The numbers in batches of 1 to 12."""
    left = iter(order)
    while batch := [*islice(left, rng.choice((1, 2, 5, 12)))]:
        yield batch


def test_conversations_are_different_in_length_and_share_beginnings(oracle_tokenizer: Any) -> None:
    prompts = [prompt_of(oracle_tokenizer, chat) for chat in chats()]
    assert len({tuple(prompt) for prompt in prompts}) == 50
    assert min(map(len, prompts)) < 50 < 500 < max(map(len, prompts))


def test_chat_template_and_tokens_equal_transformers(smollm2: Path, oracle_tokenizer: Any) -> None:
    tokenizer = Tokenizer.from_folder(smollm2)
    for chat in chats():
        text = tokenizer.render_chat_text(chat)
        assert text == oracle_tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        assert tokenizer.encode(text, add_special_tokens=False).tolist() == prompt_of(oracle_tokenizer, chat)
        for message in chat:
            content = message["content"]
            token_ids = tokenizer.encode(content).tolist()
            assert token_ids == oracle_tokenizer(content)["input_ids"]
            assert tokenizer.decode(token_ids) == oracle_tokenizer.decode(token_ids, skip_special_tokens=True)


def test_greedy_output_equals_transformers_in_mixed_batches_with_prefix_reuse(
    smollm2: Path, expected: list[list[int]]
) -> None:
    everything, rng = chats(), Random(3)
    with LLM(str(smollm2), dtype="float32") as llm:
        first = llm.chat(everything, GREEDY, progress=False)
        assert [completion.token_ids for completion in first] == expected
        order = list(range(len(everything)))
        rng.shuffle(order)
        num_cached = 0
        for batch in groups(order, rng):  # now from the cache, in other company
            for number, completion in zip(
                batch, llm.chat([everything[n] for n in batch], GREEDY, progress=False), strict=True
            ):
                assert completion.token_ids == expected[number]
                num_cached += completion.num_cached_tokens
        assert num_cached > sum(len(completion.prompt_token_ids) for completion in first) // 2


def test_greedy_output_equals_transformers_without_prefix_caching(smollm2: Path, expected: list[list[int]]) -> None:
    with LLM(str(smollm2), dtype="float32", enable_prefix_caching=False) as llm:
        completions = llm.chat(chats(12), GREEDY, progress=False)
    assert [completion.token_ids for completion in completions] == expected[:12]


def test_bfloat16_output_is_close_to_float32(smollm2: Path, expected: list[list[int]]) -> None:
    with LLM(str(smollm2), dtype="bfloat16") as llm:
        completions = llm.chat(chats(), GREEDY, progress=False)
        paris = llm.chat(chats(1)[0], GREEDY, progress=False)[0].text
    equal_starts = [
        completion.token_ids[:4] == tokens[:4] for completion, tokens in zip(completions, expected, strict=True)
    ]
    assert sum(equal_starts) >= 40  # rounding changes a near tie here and there
    assert "Paris" in paris
