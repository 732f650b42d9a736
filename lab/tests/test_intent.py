"""Laws of the intent workload, and the bundled model on a few of its sentences."""

import json
import re
from random import Random
from typing import Any

import jsonschema_rs
import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from headstart.bundled import bundled_intent_model_folder
from headstart_lab.intent.intent import (
    INTENTS,
    MAX_SLOT_CHARS,
    NUM_LISTED,
    Example,
    Preamble,
    Split,
    all_patterns,
    answer_schema,
    is_correct,
    is_valid,
    make_examples,
    make_preamble,
    swap_codes,
)
from headstart_lab.intent.intent_values import draw_value

NUM_ANSWERED = 8
LEAST_RIGHT = 6
SPLITS: tuple[Split, Split] = ("train", "heldout")
KINDS = sorted({slot.kind for intent in INTENTS.values() for slot in intent.slots})
OPEN_KINDS = sorted(set(KINDS) - {"date", "time", "duration", "degrees", "number", "amount"})


@pytest.fixture(scope="module")
def preamble() -> Preamble:
    return make_preamble(1)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(bundled_intent_model_folder())


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(bundled_intent_model_folder(), dtype=torch.float32).eval()


def test_same_seed_gives_the_same_workload_and_another_seed_another(preamble: Preamble):
    assert make_preamble(1) == preamble
    assert make_preamble(2).text != preamble.text
    assert make_examples("heldout", 20, preamble, 3) == make_examples("heldout", 20, preamble, 3)
    assert make_examples("heldout", 20, preamble, 3) != make_examples("heldout", 20, preamble, 4)


def test_preamble_shows_every_listed_intent_with_its_own_code(preamble: Preamble):
    assert len(preamble.codes) == len(set(preamble.codes.values())) == NUM_LISTED
    for name, code in preamble.codes.items():
        assert f"\n{name} {code}: {INTENTS[name].description}." in preamble.text


def test_no_pattern_is_in_both_splits():
    train, heldout = ({pattern for _, pattern in all_patterns(split)} for split in SPLITS)
    assert len(train) > 1000 and len(heldout) > 80
    assert not train & heldout


def test_words_of_heldout_patterns_are_known_from_training_patterns():
    train, heldout = (_words(" ".join(p for _, p in all_patterns(split))) for split in SPLITS)
    assert heldout <= train


@pytest.mark.parametrize("kind", KINDS)
def test_no_slot_value_is_in_both_splits(kind: str):
    train, heldout = (_drawn(kind, split) for split in SPLITS)
    assert not train & heldout
    assert len(heldout) > 3


def test_open_slots_share_no_word_but_the_scaffold():
    train, heldout = ({w.lower() for kind in OPEN_KINDS for v in _drawn(kind, s) for w in _words(v)} for s in SPLITS)
    assert train & heldout == {"street", "road", "square", "park", "lane", "the", "my", "our", "is"}


@pytest.mark.parametrize("split", SPLITS)
def test_answer_is_json_whose_values_stand_in_the_sentence(split: Split, preamble: Preamble):
    for example in make_examples(split, 300, preamble, 0):
        answer = json.loads(example.answer)
        assert list(answer) == ["name", "code", "slots"]
        assert answer["code"] == preamble.codes[answer["name"]]
        assert all(value in example.sentence for value in answer["slots"].values())
        assert list(answer["slots"]) == [s.name for s in INTENTS[answer["name"]].slots if s.name in answer["slots"]]


def test_swap_changes_every_code_and_nothing_else(preamble: Preamble):
    swapped = swap_codes(preamble, 0)
    assert sorted(swapped.codes.values()) == sorted(preamble.codes.values())
    assert all(swapped.codes[name] != code for name, code in preamble.codes.items())
    restored = swapped.text
    for name, code in preamble.codes.items():
        restored = restored.replace(f"\n{name} {swapped.codes[name]}:", f"\n{name} {code}:")
    assert restored == preamble.text != swapped.text
    for plain, other in zip(*(make_examples("heldout", 50, p, 0) for p in (preamble, swapped)), strict=True):
        a, b = json.loads(plain.answer), json.loads(other.answer)
        assert plain.sentence == other.sentence
        assert a["code"] != b["code"]
        assert {**a, "code": ""} == {**b, "code": ""}


def test_only_the_exact_answer_is_correct():
    example = Example("wake me at 7 pm", '{"name":"set_alarm","code":"K7","slots":{"time":"7 pm"}}', "set_alarm", "")
    assert is_correct(example.answer + "\n", example)
    assert not is_correct(example.answer.replace("K7", "K8"), example)
    assert not is_correct(example.answer[:-1], example)


def test_bundled_folder_is_small_and_complete():
    files = {path.name: path.stat().st_size for path in bundled_intent_model_folder().iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "README.md"} <= set(files)
    assert sum(files.values()) < 10_000_000
    assert json.loads((bundled_intent_model_folder() / "config.json").read_text())["architectures"] == [
        "LlamaForCausalLM"
    ]


def test_chat_template_renders_the_training_format(tokenizer: PreTrainedTokenizerFast):
    chat = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}, {"role": "assistant", "content": "A"}]
    asked = tokenizer.apply_chat_template(chat[:2], tokenize=False, add_generation_prompt=True)
    assert asked == "<|system|>S<|end|><|user|>U<|end|><|assistant|>"
    assert tokenizer.apply_chat_template(chat, tokenize=False) == asked + "A<|end|>"
    assert tokenizer.apply_chat_template(chat[1:2], tokenize=False, add_generation_prompt=True).startswith("<|user|>U")


def test_preamble_has_about_900_tokens_and_an_answer_about_30(tokenizer: PreTrainedTokenizerFast, preamble: Preamble):
    lengths = [len(tokenizer(make_preamble(seed).text)["input_ids"]) for seed in range(10)]
    assert all(800 <= length <= 1000 for length in lengths), lengths
    answers = [len(tokenizer(e.answer)["input_ids"]) for e in make_examples("heldout", 100, preamble, 0)]
    assert 20 <= sum(answers) / len(answers) <= 35


def test_copying_is_the_identity_on_tokens(tokenizer: PreTrainedTokenizerFast, preamble: Preamble):
    for example in make_examples("heldout", 50, preamble, 0):
        sentence = tokenizer(example.sentence)["input_ids"]
        for value in json.loads(example.answer)["slots"].values():
            ids = tokenizer(value)["input_ids"][value.startswith(("the ", "in ", "my ", "our ")) :]
            assert any(sentence[i : i + len(ids)] == ids for i in range(len(sentence))), (example.sentence, value)


def test_bundled_model_answers_heldout_sentences_and_follows_swapped_codes(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, preamble: Preamble
):
    for listed in (preamble, swap_codes(preamble, 0)):
        examples = make_examples("heldout", NUM_ANSWERED, listed, 0)
        right = sum(is_correct(_ask(model, tokenizer, listed, e.sentence), e) for e in examples)
        assert right >= LEAST_RIGHT


@torch.inference_mode()
def _ask(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, preamble: Preamble, sentence: str) -> str:
    chat = [{"role": "system", "content": preamble.text}, {"role": "user", "content": sentence}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    output = model.generate(prompt, attention_mask=torch.ones_like(prompt))
    return tokenizer.decode(output[0, prompt.shape[1] :], skip_special_tokens=True)


def _words(text: str) -> set[str]:
    return set(re.findall(r"[A-Za-z']+", re.sub(r"\{\w+\}", "", text)))


def _drawn(kind: str, split: Split) -> set[str]:
    rng = Random(f"{kind}/{split}")
    return {draw_value(kind, split, rng) for _ in range(400)}


def test_the_schema_of_a_preamble_takes_its_right_answers_and_nothing_else() -> None:
    preamble = make_preamble("schema", 8)
    validator = jsonschema_rs.validator_for(answer_schema(preamble))
    for example in make_examples("heldout", 200, preamble, "schema"):
        assert validator.is_valid(json.loads(example.answer)) and is_valid(example.answer, preamble)
    name, code = next(iter(preamble.codes.items()))
    other = next(code for code in ("z9", "q0") if code not in preamble.codes.values())
    wrong: list[Any] = [
        [],
        {"name": name, "code": other, "slots": {}},
        {"name": "nothing", "code": code, "slots": {}},
        {"name": name, "code": code},
        {"name": name, "code": code, "slots": {"no_slot": "x"}},
        {"name": name, "code": code, "slots": {}, "more": 1},
        {"name": name, "code": code, "slots": {slot.name: 1 for slot in INTENTS[name].slots}},
    ]
    for value in wrong:
        assert not validator.is_valid(value) and not is_valid(json.dumps(value), preamble), value
    named = next(name for name in preamble.codes if INTENTS[name].slots)
    slots = {INTENTS[named].slots[0].name: "x" * MAX_SLOT_CHARS}
    assert validator.is_valid({"name": named, "code": preamble.codes[named], "slots": slots})
    endless = {name: text + "x" for name, text in slots.items()}
    assert not validator.is_valid({"name": named, "code": preamble.codes[named], "slots": endless})
    assert not is_valid("{", preamble)
