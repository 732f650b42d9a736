"""Answers of the bundled model on held-out sentences, with prefix caching off and on: the tokens must be equal.

Computed in float32, so that the order of additions cannot decide between two tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from headstart.engine.llm import LLM, Completion
from headstart.measurement.progress_bar import QUIET, ProgressBar
from headstart.measurement.report import BenchmarkReport, ReportTable
from headstart.measurement.runner import BUNDLED
from headstart_lab.intent.intent import Example, answer_schema, is_correct, is_valid, make_examples, make_preamble

MAX_TOKENS = 192  # an answer has about 30; with a schema it ends before, whatever the model writes
TOGETHER = 20  # sentences in one batch


class Completed(Protocol):
    """The fields of `llm.Completion` that this benchmark reads; tests provide their own."""

    @property
    def text(self) -> str: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def prompt_token_ids(self) -> Sequence[int]: ...
    @property
    def num_cached_tokens(self) -> int: ...


class Answer(Protocol):
    """Greedy completions in float32, one per conversation, each constrained by its schema if `schemas` are given."""

    def __call__(
        self, conversations: list[list[dict[str, str]]], caching: bool, schemas: list[dict[str, Any]] | None = None, /
    ) -> Sequence[Completed]: ...


@dataclass(frozen=True, slots=True)
class AccuracyConfig:
    """The number of requests: `examples` sentences, spread evenly over `preambles` preambles."""

    examples: int = 200
    preambles: int = 4
    seed: int = 0
    schema: bool = False  # also with answers constrained by the schema of their preamble


@dataclass(frozen=True, slots=True)
class Accuracy:
    """The measured values and the problems."""

    values: dict[str, Any]
    problems: list[str]


def measure_accuracy(answer: Answer, config: AccuracyConfig, bar: ProgressBar = QUIET) -> Accuracy:
    """Send every request with caching off and on. Only answers with exactly the expected JSON count as correct."""
    examples, conversations = questions(config)
    found: dict[str, Sequence[Completed]] = {}
    for name in ("off", "on"):
        bar.start_stage(f"{len(examples)} sentences, caching {name}", len(examples))
        found[name] = answer(conversations, name == "on")
    right = {
        name: sum(is_correct(one.text, example) for one, example in zip(completions, examples, strict=True))
        for name, completions in found.items()
    }
    differing = sum(list(a.token_ids) != list(b.token_ids) for a, b in zip(found["off"], found["on"], strict=True))
    prompt_tokens = sum(len(one.prompt_token_ids) for one in found["on"])
    cached = {name: sum(one.num_cached_tokens for one in completions) for name, completions in found.items()}
    values = {
        "accuracy": right["on"] / len(examples),
        "accuracy_on": right["on"] / len(examples),
        "accuracy_off": right["off"] / len(examples),
        "cached_share": cached["on"] / prompt_tokens,
        "differing_answers": differing,
        "examples": len(examples),
        "preambles": config.preambles,
    }
    problems: list[str] = []
    if differing:
        problems.append(f"{differing} of {len(examples)} answers differ between caching off and on in float32")
    if cached["off"]:
        problems.append(f"{cached['off']} tokens were cached with caching off")
    if config.schema:
        _measure_with_schema(answer, config, Accuracy(values, problems), bar)
    return Accuracy(values, problems)


def _measure_with_schema(answer: Answer, config: AccuracyConfig, found: Accuracy, bar: ProgressBar) -> None:
    """Send every request with the schema of its preamble; add the figures and problems to `found`."""
    examples, conversations = questions(config)
    preambles = [make_preamble(seed) for seed, share in _shares(config) for _ in range(share)]
    bar.start_stage(f"{len(examples)} sentences, with a schema", len(examples))
    completions = answer(conversations, True, [answer_schema(preamble) for preamble in preambles])
    num_valid = sum(is_valid(one.text, preamble) for one, preamble in zip(completions, preambles, strict=True))
    num_right = sum(is_correct(one.text, example) for one, example in zip(completions, examples, strict=True))
    found.values["accuracy_schema"] = num_right / len(examples)
    found.values["valid_schema"] = num_valid / len(examples)
    if num_valid < len(examples):
        found.problems.append(f"{len(examples) - num_valid} of {len(examples)} constrained answers are not valid")
    if found.values["accuracy_schema"] < found.values["accuracy_on"]:
        found.problems.append("fewer answers are exact with a schema than without")


def bundled_accuracy(examples: int, schema: bool, threads: int) -> Callable[[BenchmarkReport, ProgressBar], None]:
    """Return a function that adds the accuracy of the bundled model to a report: `headstart bench intent` calls it."""

    def add(report: BenchmarkReport, bar: ProgressBar) -> None:
        add_accuracy(report, AccuracyConfig(examples=examples, schema=schema), bundled_answers(threads, bar), bar)

    return add


def add_accuracy(report: BenchmarkReport, config: AccuracyConfig, answer: Answer, bar: ProgressBar = QUIET) -> None:
    """Measure the answers, and add their figures, problems and table to a report."""
    accuracy = measure_accuracy(answer, config, bar)
    report.values.update(accuracy.values)
    report.setup["accuracy_model"] = BUNDLED
    report.setup["accuracy_dtype"] = "float32"
    report.problems += accuracy.problems
    report.sheets.append(_table(accuracy.values))


def bundled_answers(threads: int, bar: ProgressBar = QUIET) -> Answer:
    """Return the answer function of the bundled model, in float32, through the Python API and its chat template."""

    def answer(
        conversations: list[list[dict[str, str]]], caching: bool, schemas: list[dict[str, Any]] | None = None, /
    ) -> list[Completion]:
        llm = LLM(dtype="float32", threads=threads, enable_prefix_caching=caching)
        completions: list[Completion] = []
        start = 0
        while start < len(conversations):
            schema = None if schemas is None else schemas[start]
            part = conversations[start : start + TOGETHER]
            if schemas is not None:  # the requests of one call have one schema
                part = part[: next((i for i, one in enumerate(schemas[start:]) if one != schema), len(part))]
            sampling = {"temperature": 0, "max_tokens": MAX_TOKENS, "guided_json": schema}
            completions += llm.chat(part, sampling, progress=False)
            bar.advance(len(part))
            start += len(part)
        return completions

    return answer


def questions(config: AccuracyConfig) -> tuple[list[Example], list[list[dict[str, str]]]]:
    """Return held-out examples and one conversation for each."""
    examples: list[Example] = []
    conversations: list[list[dict[str, str]]] = []
    for seed, share in _shares(config):
        preamble = make_preamble(seed)
        for example in make_examples("heldout", share, preamble, seed):
            examples.append(example)
            conversations.append(
                [{"role": "system", "content": preamble.text}, {"role": "user", "content": example.sentence}]
            )
    return examples, conversations


def _shares(config: AccuracyConfig) -> list[tuple[str, int]]:
    """Return the seed of each preamble and its number of sentences."""
    return [
        (
            f"bench/{config.seed}/{index}",
            config.examples // config.preambles + (index < config.examples % config.preambles),
        )
        for index in range(config.preambles)
    ]


def _table(values: dict[str, Any]) -> ReportTable:
    columns = ("bundled model, float32", "caching off", "caching on")
    rows = (
        ("exact answers", values["accuracy_off"], values["accuracy_on"]),
        ("prompt tokens cached", 0.0, values["cached_share"]),
    )
    if "accuracy_schema" in values:
        rows += (("exact with a schema", None, values["accuracy_schema"]),)
        rows += (("valid with a schema", None, values["valid_schema"]),)
    return ReportTable(f"{values['examples']} held-out sentences, {values['preambles']} preambles", columns, rows)
