"""Sample constrained answers from a server and check every one: sampled.py [--answers 10000] [--model MODEL ...].

Every schema of the JSON-Schema-Test-Suite is sent as it is and with bounds (bounded.py), at temperatures 0 and 1 with
several seeds, to a server with the bundled model and one with random weights, or those of --model. An answer that ends
by itself must be valid by the standard; an answer cut by max_tokens must be a prefix of a valid one; a refusal must be
a 400 that names a keyword of the schema. Exits with 1 otherwise. The last line of stdout is JSON.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from datetime import date
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import aiohttp
from llguidance import LLTokenizer

from headstart_lab.structured.bounded import bounded
from headstart_lab.structured.checks import BROKEN, Answer, Checker, Result
from headstart_lab.structured.serving import Running, post_chat, schema_request, serving
from headstart_lab.structured.suite import DRAFTS, SuiteSchema, fetch_suite, read_suite

BUNDLED, RANDOM_WEIGHTS = "bundled", "random weights"
MAX_TOKENS = 96
SHOWN = 12  # broken answers of each kind in the report


class Ask(NamedTuple):
    """A request: a schema of the suite, the schema that is sent for it, and the sampling parameters."""

    case: SuiteSchema
    sent: Any
    sampling: dict[str, Any]


class Tally:
    """Counts of results, in all and by keyword, and the first broken answers. Finished answers go into `kept`."""

    def __init__(self, kept: TextIO | None = None) -> None:
        self._kept = kept
        self.results: Counter[Result] = Counter()
        self.refusals: Counter[str] = Counter()
        self.broken: dict[str, list[dict[str, Any]]] = {}

    def add(self, ask: Ask, answer: Answer, result: Result) -> None:
        """Count one answer."""
        self.results[result] += 1
        if answer.status == 400:
            self.refusals[f"{ask.case.draft} {ask.case.keyword}: {answer.text[:160]}"] += 1
        if self._kept is not None and answer.finish_reason == "stop":
            schema = {"draft": ask.case.draft, "schema": ask.case.schema, "text": answer.text}
            self._kept.write(json.dumps(schema) + "\n")
        if result in BROKEN:
            shown = {"schema": ask.case.name, "sent": json.dumps(ask.sent)[:600], "text": answer.text[:300]}
            same = self.broken.setdefault(result.value, [])
            if len(same) < SHOWN:
                same.append({"status": answer.status, **shown, **ask.sampling})

    @property
    def num_answers(self) -> int:
        """Return the number of constrained answers."""
        refused = (Result.REFUSED, Result.UNNAMED, Result.FAILED)
        return sum(number for result, number in self.results.items() if result not in refused)

    def report(self) -> dict[str, Any]:
        """Return the counts as JSON."""
        return {
            "answers": self.num_answers,
            "results": {result.value: self.results[result] for result in Result},
            "refusals": dict(sorted(self.refusals.items())),
            "broken": self.broken,
        }


def rounds(cases: list[SuiteSchema], most_choices: int = 8) -> Iterator[list[Ask]]:
    """Yield rounds of requests: in each, every schema as it is and bounded; the first is greedy."""
    for number in count():
        greedy = {"temperature": 0, "max_tokens": MAX_TOKENS, "seed": number}
        drawn = {"temperature": 1, "max_tokens": MAX_TOKENS, "seed": number, "n": most_choices}
        for sampling in [greedy, drawn] if number == 0 else [drawn]:
            yield [
                Ask(case, form(case.schema), sampling) for case in cases for form in (lambda schema: schema, bounded)
            ]


async def sample(server: Running, asks: list[Ask], folder: Path, tally: Tally, at_once: int) -> set[int]:
    """Send the requests, check the answers, and return the numbers of the requests that were refused."""
    tokenizer, numbers, refused = LLTokenizer("byte"), iter(range(len(asks))), set[int]()
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:

        async def work() -> None:
            for number in numbers:
                ask = asks[number]
                checker = Checker(ask.case, ask.sent, folder, tokenizer)
                body = json.dumps(schema_request(ask.sent, **ask.sampling)).encode()
                for answer in await post_chat(session, server.url, body):
                    tally.add(ask, answer, checker.check(answer))
                    if answer.status == 400:
                        refused.add(number)

        await asyncio.gather(*(work() for _ in range(at_once)))
    return refused


def run(server: Running, cases: list[SuiteSchema], folder: Path, wanted: int, at_once: int, tally: Tally) -> None:
    """Sample rounds until there are `wanted` answers; refused schemas are sent in the first round only."""
    skip = set[str]()
    for asks in rounds(cases):
        asks = [ask for ask in asks if json.dumps(ask.sent) not in skip]
        before = tally.num_answers
        refused = asyncio.run(sample(server, asks, folder, tally, at_once))
        skip |= {json.dumps(asks[number].sent) for number in refused}
        print(
            f"{tally.num_answers} answers; broken: {sum(tally.results[result] for result in BROKEN)}", file=sys.stderr
        )
        if tally.num_answers >= wanted or tally.num_answers == before:
            return


def random_model(folder: Path) -> str:
    """Make a model with random weights, and return its folder."""
    from headstart.model.weights.init_model import write_random_model

    return str(write_random_model("tiny", folder / "random", std=0.2, dtype="float32", progress=False))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=10_000, help="over all models; default: 10000")
    parser.add_argument(
        "--model", action="append", help="a folder, bundled or 'random weights'; --report keeps the others"
    )
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--keyword", action="append", help="only these files of the suite")
    parser.add_argument("--report", type=Path, help="also write the report here")
    parser.add_argument("--keep", type=Path, help="also write the finished answers here, for rejudge.py")
    options = parser.parse_args()
    suite = fetch_suite()
    cases = [case for draft in DRAFTS for case in read_suite(suite, draft)]
    cases = [case for case in cases if not options.keyword or case.keyword in options.keyword]
    models: list[str] = options.model or [BUNDLED, RANDOM_WEIGHTS]
    reports: dict[str, dict[str, Any]] = {}
    if options.report and options.report.exists() and options.model:
        reports = json.loads(options.report.read_text(encoding="utf-8"))["models"]
    kept = options.keep.open("a", encoding="utf-8") if options.keep else None
    for model in models:
        tally = Tally(kept)
        with tempfile.TemporaryDirectory() as room:
            source = random_model(Path(room)) if model == RANDOM_WEIGHTS else "" if model == BUNDLED else model
            with serving(source, Path(room) / "log", "--no-access-log") as server:
                run(server, cases, suite, -(-options.answers // len(models)), options.at_once, tally)
        reports[Path(model).name] = {
            "date": date.today().isoformat(),
            "llguidance": version("llguidance"),
            **tally.report(),
        }
    if kept is not None:
        kept.close()
    broken = sum(report["results"][result.value] for report in reports.values() for result in BROKEN)
    document = {
        "valid": not broken,
        "answers": sum(report["answers"] for report in reports.values()),
        "models": reports,
    }
    if options.report:
        options.report.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({key: value for key, value in document.items() if key != "models"}))
    return 0 if document["valid"] else 1


if __name__ == "__main__":
    sys.exit(main())
