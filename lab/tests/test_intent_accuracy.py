"""The accuracy that `headstart bench intent` reports, with made-up answers."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from headstart.measurement.report import BenchmarkReport
from headstart_lab.intent.intent import make_examples, make_preamble
from headstart_lab.intent.intent_accuracy import AccuracyConfig, Answer, add_accuracy

ASKED = AccuracyConfig(examples=6, preambles=2)


@dataclass(frozen=True)
class Completed:
    text: str
    token_ids: Sequence[int]
    prompt_token_ids: Sequence[int]
    num_cached_tokens: int


def knowing(conversations: list[list[dict[str, str]]], caching: bool) -> list[Completed]:
    """Answers every sentence right, from the bench's own examples."""
    answers = {}
    for index in range(ASKED.preambles):
        name = f"bench/{ASKED.seed}/{index}"
        preamble = make_preamble(name)
        answers |= {(preamble.text, e.sentence): e.answer for e in make_examples("heldout", 3, preamble, name)}
    return [
        Completed(answers[system["content"], user["content"]], [1, 2], list(range(10)), 5 * caching)
        for system, user in conversations
    ]


def measured(answer: Answer) -> BenchmarkReport:
    report = BenchmarkReport("intent", {})
    add_accuracy(report, ASKED, answer)
    return report


def test_a_knowing_model_scores_one_with_and_without_caching() -> None:
    report = measured(knowing)
    figures = {key: report.values[key] for key in ("accuracy", "accuracy_on", "accuracy_off", "cached_share")}
    assert figures == {"accuracy": 1.0, "accuracy_on": 1.0, "accuracy_off": 1.0, "cached_share": 0.5}
    assert report.problems == [] and report.values["examples"] == 6


def test_one_different_token_between_off_and_on_invalidates_the_run() -> None:
    def wavering(conversations: list[list[dict[str, str]]], caching: bool) -> list[Completed]:
        first, *others = knowing(conversations, caching)
        return [Completed("{}", [1, 3], first.prompt_token_ids, 0) if caching else first, *others]

    report = measured(wavering)
    assert report.values["accuracy_on"] == pytest.approx(5 / 6) and report.values["accuracy_off"] == 1.0
    assert "1 of 6 answers differ" in report.problems[0]


def test_cached_tokens_with_caching_off_invalidate_the_run() -> None:
    report = measured(lambda asked, caching: knowing(asked, True))
    assert "with caching off" in report.problems[0]
