"""The intents of the synthetic intent-recognition workload: descriptions, slots and sentence patterns.

Not the generator (that is `intent`) and not the slot values (`intent_values`). A pattern is a tiny grammar:
`(a|b|)` picks one alternative, `{slot}` stands for a value. A pattern that starts with `=` is a whole sentence;
any other is an imperative that may follow "please", "could you" and the like. `heldout` patterns are never used in
training; each of their words also occurs in training patterns, so they test word order and phrasing, not spelling.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Slot:
    """One slot: its key in the answer, the kind of its values (see `intent_values`), and its meaning."""

    name: str
    kind: str
    meaning: str


@dataclass(frozen=True, slots=True)
class Intent:
    """One intent: its name, what the user wants, its slots in answer order, and its patterns per split."""

    name: str
    description: str
    slots: tuple[Slot, ...]
    train: tuple[str, ...]
    heldout: tuple[str, ...]


def intent(name: str, description: str, slots: str, train: str, heldout: str) -> Intent:
    """Build an intent from text: slots as `name:kind:meaning; ...`, one pattern per line."""
    fields = [part.strip().split(":") for part in slots.split(";") if part.strip()]
    return Intent(
        name,
        description,
        tuple(Slot(*field) for field in fields),
        tuple(line.strip() for line in train.strip().splitlines()),
        tuple(line.strip() for line in heldout.strip().splitlines()),
    )
