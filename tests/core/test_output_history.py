"""Earlier outputs: how much of them is kept."""

from array import array

import pytest

from headstart.core.cache.hashing import root_hash
from headstart.core.request import Request, SamplingParams
from headstart.core.sequence import Sequence
from headstart.core.speculation import output_history
from headstart.core.speculation.output_history import OutputHistory

ROOT = root_hash(b"", adapter=None, domain=b"")


def finished(prompt: list[int], output: list[int]) -> Sequence:
    request = Request("a", array("i", prompt), SamplingParams())
    return Sequence(request, array("i", prompt + output), ROOT, ROOT)


def test_an_output_is_found_with_the_end_of_its_prompt() -> None:
    history = OutputHistory(2, context=3)
    seq = finished([1, 2, 3, 4, 5], [6, 7, 8])
    history.add_output(seq)
    found = history.find_draft(seq, array("i", [2, 3, 4, 5]), 9)
    assert found is not None and (found.tokens.tolist(), found.match_length) == ([6, 7, 8], 3)


def test_of_a_long_output_the_end_is_kept_and_of_many_the_latest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_history, "OUTPUT_TOKENS", 6)
    monkeypatch.setattr(output_history, "GENERATION_TOKENS", 14)
    history = OutputHistory(2, context=0)
    seq = finished([1], [*range(100, 110)])
    history.add_output(seq)
    assert history.find_draft(seq, array("i", [102, 103]), 9) is None
    found = history.find_draft(seq, array("i", [104, 105]), 9)
    assert found is not None and found.tokens.tolist() == [106, 107, 108, 109]
    for first in (200, 300, 400, 500):
        history.add_output(finished([1], [*range(first, first + 6)]))
    kept = [first for first in (104, 200, 300, 400, 500) if history.find_draft(seq, array("i", [first, first + 1]), 9)]
    assert kept == [300, 400, 500]  # the full generation before, and the one being filled
