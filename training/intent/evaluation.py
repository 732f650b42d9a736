"""Exact-match accuracy of a model folder on held-out sentences, through transformers' `generate` and chat template."""

import time
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedTokenizerFast

from headstart_lab.intent.intent import Example, Preamble, Split, is_correct, make_examples, make_preamble, swap_codes

NUM_PREAMBLES = 8
MAX_NEW_TOKENS = 64


def evaluate(folder: Path, num_sentences: int) -> dict[str, float | int]:
    """Return accuracies in fp32 and bf16: held-out plain and swapped, and training patterns for comparison."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    figures: dict[str, float | int] = {"sentences": num_sentences}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        for label, split, swapped in (
            ("heldout", "heldout", False),
            ("heldout_swapped", "heldout", True),
            ("train_patterns", "train", False),
        ):
            started = time.process_time()
            figures[f"{label}_{name}"] = round(_accuracy(model, tokenizer, split, swapped, num_sentences), 4)
            tqdm.write(f"{label} {name}: {figures[f'{label}_{name}']} ({time.process_time() - started:.0f} CPU s)")
    return figures


def _accuracy(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, split: Split, swapped: bool, num_sentences: int
) -> float:
    """Return the share of sentences answered exactly, over preambles that training did not see."""
    right = total = 0
    for seed in range(NUM_PREAMBLES):
        preamble = make_preamble(f"evaluation/{seed}")
        preamble = swap_codes(preamble, seed) if swapped else preamble
        examples = make_examples(split, num_sentences // NUM_PREAMBLES, preamble, f"evaluation/{seed}")
        for example, text in zip(examples, answer(model, tokenizer, preamble, examples), strict=True):
            total += 1
            right += is_correct(text, example)
            if not is_correct(text, example):
                tqdm.write(f"  {example.sentence}\n    want {example.answer}\n    got  {text}")
    return right / total


@torch.inference_mode()
def answer(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, preamble: Preamble, examples: list[Example]
) -> list[str]:
    """Return greedy answers, one at a time; the shared prefix is computed once and kept in the cache."""
    head = {"role": "system", "content": preamble.text}
    cache = DynamicCache(config=model.config)
    shared = tokenizer.apply_chat_template([head], return_tensors="pt", return_dict=False)
    model(shared, past_key_values=cache)
    texts: list[str] = []
    for example in examples:
        chat = [head, {"role": "user", "content": example.sentence}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=False)
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            past_key_values=cache,
            max_new_tokens=MAX_NEW_TOKENS,
            do_sample=False,
        )
        texts.append(tokenizer.decode(output[0, prompt.shape[1] :], skip_special_tokens=True))
        cache.crop(shared.shape[1] - cache.get_seq_length())
    return texts
