"""Intent recognition as a workload: one long preamble of intents, many short sentences, answers in JSON.

The generator behind the bundled model, its training and `headstart bench intent`; not a measure of language
understanding. A preamble (the system message) lists intents with a random code each; a sentence (the user message)
asks for one of them; the answer names the intent, its code *in this preamble*, and the slot values word for word.

Invariants: everything is a function of its seed. The train and held-out splits share no sentence pattern, no slot
value and, in open slots (city, person, ...), no word but scaffold such as "Street" and "the". Swapping codes changes
codes only: in the text and the answers.

    preamble = make_preamble(seed=0)
    example = make_examples("heldout", 1, preamble, seed=0)[0]
    is_correct(answer_of_the_model, example)
"""

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

from headstart_lab.intent.intent_people_things import PEOPLE, THINGS
from headstart_lab.intent.intent_schema import Intent
from headstart_lab.intent.intent_travel_home import HOME, TRAVEL
from headstart_lab.intent.intent_values import draw_value, is_adverb

Split = Literal["train", "heldout"]

INTENTS: dict[str, Intent] = {intent.name: intent for intent in (*TRAVEL, *HOME, *PEOPLE, *THINGS)}
MAX_SLOT_CHARS = 48  # of a slot in the schema: the longest have about 30
NUM_LISTED = 15
"""Intents in a full preamble: about 900 tokens of the bundled tokenizer."""

_HEADER = (
    "You label what people ask of a home and travel assistant. Below is the list of intents: the name of the intent, "
    "its code, what the user wants, the slots with their meaning, and an example. Find the intent of the sentence and "
    "answer with one line of JSON: the name, the code that the list gives, and the slots. Copy each slot from the "
    "sentence word for word. Leave out a slot that the sentence does not give.\n"
)
_SHORT_HEADER = "Label the sentence.\n"
_CODE_LETTERS = "BCDEFGHJKLMNPQRSTUVWXYZ"
_CALLS = (
    "hey",
    "hello",
    "so",
    "please",
    "ok",
    "well",
    "now",
    "hey you",
    "so you",
    "ok please",
    "well hello",
    "now please",
)
_COMMANDS: dict[Split, tuple[str, ...]] = {
    "train": (
        *("{}", "{}", "{}", "please {}", "can you {}?", "could you {}?", "could you please {}?", "would you {}?"),
        *("I want you to {}", "I need you to {}", "hello, can you {}?", "I would like to ask you to {}"),
        *("{} please", "{}, thanks", "{} for me", "hello, {}, thank you", "now {}", "would you please {}?"),
        *(f"{call}, {{}}" for call in _CALLS),
    ),
    "heldout": ("{}", "hello, please {}", "hey, could you {}?", "I would like you to {}", "can you please {}?"),
}
_STATEMENTS: dict[Split, tuple[str, ...]] = {
    "train": ("{}",) * len(_CALLS) + tuple(f"{call}, {{}}" for call in _CALLS),
    "heldout": ("{}", "hello you, {}", "so please, {}"),
}
_SCRAMBLED_SHARE = 0.4
_DROPPED_SHARE = 0.2
_UNIT = re.compile(r"((?:\b(?:to|in|on|for|at|by|from|about|with|of|into|after|the) )*\{\w+\})")
_ALTERNATIVES = re.compile(r"\(([^()]*)\)")
_SLOT = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class Preamble:
    """The system message, and the code of each intent it lists (name -> code, in the order of the text)."""

    text: str
    codes: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Example:
    """A user sentence, the one right answer, the intent, and the sentence pattern (slots as `{name}`)."""

    sentence: str
    answer: str
    intent: str
    pattern: str


def make_preamble(seed: int | str, num_intents: int = NUM_LISTED, *, short: bool = False) -> Preamble:
    """Return a preamble with `num_intents` random intents in random order, each with a random code.

    `short` omits instructions, meanings and examples: about 15 tokens per intent instead of 50.
    """
    rng = Random(f"preamble/{seed}")
    names = rng.sample(sorted(INTENTS), num_intents)
    codes = dict(zip(names, _draw_codes(num_intents, rng), strict=True))
    entries = (_entry(INTENTS[name], code, short, rng) for name, code in codes.items())
    return Preamble((_SHORT_HEADER if short else _HEADER) + "\n".join(entries), codes)


def swap_codes(preamble: Preamble, seed: int | str) -> Preamble:
    """Return the same preamble with its codes permuted, so that no intent keeps its code."""
    rng = Random(f"swap/{seed}")
    old = list(preamble.codes.values())
    new = old.copy()
    while any(a == b for a, b in zip(old, new, strict=True)):
        rng.shuffle(new)
    codes = dict(zip(preamble.codes, new, strict=True))
    text = preamble.text
    for name, code in preamble.codes.items():
        text = text.replace(_label(name, code), _label(name, codes[name]))
    return Preamble(text, codes)


def make_examples(split: Split, num: int, preamble: Preamble, seed: int | str) -> list[Example]:
    """Return `num` sentences of the split, each about a random intent of the preamble.

    The sentences depend on the names in the preamble and the seed, not on the codes: a swapped preamble gives the
    same sentences with other answers.
    """
    rng = Random(f"examples/{split}/{seed}")
    names = list(preamble.codes)
    return [
        _example(INTENTS[name], preamble.codes[name], split, rng, is_scrambled=split == "train")
        for name in rng.choices(names, k=num)
    ]


def is_correct(text: str, example: Example) -> bool:
    """Return whether a model's answer is exactly the expected JSON, apart from surrounding white space."""
    return text.strip() == example.answer


def make_answer(name: str, code: str, slots: Mapping[str, str]) -> str:
    """Return the answer text: compact JSON with the keys name, code, slots in this order."""
    return json.dumps({"name": name, "code": code, "slots": dict(slots)}, ensure_ascii=False, separators=(",", ":"))


def answer_schema(preamble: Preamble) -> dict[str, Any]:
    """Return the JSON Schema of the answers to a preamble: an intent that it lists, its code, slots of that intent."""
    return {"anyOf": [_intent_schema(INTENTS[name], code) for name, code in preamble.codes.items()]}


def is_valid(text: str, preamble: Preamble) -> bool:
    """Return whether an answer is JSON of the schema of its preamble."""
    try:
        value = json.loads(text)
        slots = value["slots"]
        names = {slot.name for slot in INTENTS[value["name"]].slots}
        is_listed = preamble.codes[value["name"]] == value["code"]
        is_text = all(isinstance(slot, str) for slot in slots.values())
    except (ValueError, KeyError, TypeError, AttributeError):
        return False
    return is_listed and is_text and value.keys() == {"name", "code", "slots"} and slots.keys() <= names


def _intent_schema(intent: Intent, code: str) -> dict[str, Any]:
    text = {"type": "string", "maxLength": MAX_SLOT_CHARS}
    slots = {"type": "object", "properties": {slot.name: text for slot in intent.slots}}
    properties = {"name": {"const": intent.name}, "code": {"const": code}}
    return {
        "type": "object",
        "properties": {**properties, "slots": {**slots, "additionalProperties": False}},
        "required": ["name", "code", "slots"],
        "additionalProperties": False,
    }


def all_patterns(split: Split) -> Iterator[tuple[str, str]]:
    """Yield every (intent name, pattern) of the split with its alternatives expanded, without polite frames."""
    for intent in INTENTS.values():
        for grammar in _grammars(intent, split):
            parts = _ALTERNATIVES.split(grammar)
            for choice in itertools.product(*(part.split("|") if i % 2 else (part,) for i, part in enumerate(parts))):
                yield intent.name, _tidy("".join(choice)).removeprefix("=")


def _grammars(intent: Intent, split: Split) -> tuple[str, ...]:
    return intent.train if split == "train" else intent.heldout


def _draw_codes(num: int, rng: Random) -> list[str]:
    return rng.sample([letter + digit for letter in _CODE_LETTERS for digit in "0123456789"], num)


def _label(name: str, code: str) -> str:
    return f"{name} {code}:"


def _entry(intent: Intent, code: str, short: bool, rng: Random) -> str:
    """Return the lines of one intent in a preamble."""
    if short:
        return f"{_label(intent.name, code)} {intent.description}. Slots: {', '.join(s.name for s in intent.slots)}."
    slots = ", ".join(f"{slot.name} ({slot.meaning})" for slot in intent.slots)
    sentence = _example(intent, code, "train", rng, is_scrambled=False).sentence
    return f"{_label(intent.name, code)} {intent.description}. Slots: {slots}. Example: {sentence}"


def _example(intent: Intent, code: str, split: Split, rng: Random, *, is_scrambled: bool) -> Example:
    grammar = rng.choice(_grammars(intent, split))
    core = _tidy(_ALTERNATIVES.sub(lambda match: rng.choice(match[1].split("|")), grammar))
    if is_scrambled and "{text}" not in core and rng.random() < _SCRAMBLED_SHARE:
        core = _scramble(core, rng)
    pattern = _wrap(core, split, rng)
    kinds = {slot.name: slot.kind for slot in intent.slots}
    slots = {name: draw_value(kinds[name], split, rng) for name in kinds if f"{{{name}}}" in core}
    return Example(_fill(pattern, slots, rng), make_answer(intent.name, code, slots), intent.name, pattern)


def _scramble(core: str, rng: Random) -> str:
    """Return a training pattern in another word order, sometimes without one slot; never a held-out pattern.

    The words right before a slot stay with it, so that the sentence still shows which value is which.
    """
    units = [unit.strip(" ,?=") for unit in _UNIT.split(core)]
    units = [unit for unit in units if unit]
    optional = [unit for unit in units if _SLOT.search(unit) and not unit.startswith("{")]
    if rng.random() < _DROPPED_SHARE and len(_SLOT.findall(core)) > 1 and optional:
        units.remove(rng.choice(optional))
    rng.shuffle(units)
    scrambled = rng.choice((" ", " ", ", ")).join(units)
    return core if scrambled in _HELDOUT_PATTERNS else "=" + scrambled


def _wrap(core: str, split: Split, rng: Random) -> str:
    """Wrap a core in a polite frame; nothing may follow free text, since it would become part of the text."""
    frames = (_STATEMENTS if core.startswith("=") else _COMMANDS)[split]
    if core.endswith("{text}"):
        frames = tuple(frame for frame in frames if frame.endswith("{}"))
    frame = rng.choice(frames)
    core = core.removeprefix("=")
    return frame.format(core if frame.endswith("{}") else core.rstrip("?"))


def _fill(pattern: str, slots: Mapping[str, str], rng: Random) -> str:
    """Insert the values; drop "on" before an adverb; vary the full stop and the first capital."""
    for name, value in slots.items():
        if is_adverb(value):
            preposition = "on|for" if value.startswith("in ") else "on"
            pattern = re.sub(rf"\b(?:{preposition}) \{{{name}\}}", f"{{{name}}}", pattern)
    sentence = _SLOT.sub(lambda match: slots[match[1]], pattern)
    if not pattern.startswith("{") and rng.random() < 0.5:
        sentence = sentence[0].upper() + sentence[1:]
    if sentence[-1] != "?" and rng.random() < 0.5:
        sentence += "."
    return sentence


def _tidy(text: str) -> str:
    return " ".join(text.split()).replace(" ,", ",").replace(" ?", "?").replace(" :", ":").replace("= ", "=")


_HELDOUT_PATTERNS = frozenset(pattern for _, pattern in all_patterns("heldout"))
