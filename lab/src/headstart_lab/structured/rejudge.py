"""Judge kept answers by Python's `jsonschema`, a second validator: rejudge.py ANSWERS.jsonl SUITE.

ANSWERS.jsonl is the file of sampled.py --keep, SUITE the folder of the JSON-Schema-Test-Suite (for remote references).
Needs `jsonschema[format-nongpl]` and nothing of Headstart, so it runs in an environment of its own. Numbers beyond the
doubles are read as the largest double, as in checks.py. Python's regular expressions are not those of ECMA 262: a text
beyond ASCII that fails a pattern only (\\W, \\s) is counted apart. Exits with 1 if another answer is not valid.
"""

import json
import math
import sys
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal, getcontext
from pathlib import Path
from typing import Any

from jsonschema import Draft7Validator, Draft202012Validator
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

VALIDATORS = {"draft2020-12": Draft202012Validator, "draft7": Draft7Validator}
VALID, DIALECT, INVALID = "valid", "a pattern of another dialect", "invalid"
REMOTE = "http://localhost:1234/"
LARGEST = Decimal("1.7976931348623157e308")


def number(digits: str) -> Decimal:
    """Return a number as a decimal: a double is no multiple of 0.01 any more after 17 digits."""
    return Decimal(digits) if math.isfinite(float(digits)) else LARGEST.copy_sign(Decimal(digits))


def judge(path: Path, suite: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield for every answer VALID, DIALECT or INVALID, and the answer."""

    def retrieve(uri: str) -> Resource[Any]:
        text = (suite / "remotes" / uri.removeprefix(REMOTE)).read_text(encoding="utf-8")
        return Resource.from_contents(json.loads(text), default_specification=DRAFT202012)

    known: dict[str, Any] = {}
    for line in path.open(encoding="utf-8"):
        answer = json.loads(line)
        kind = VALIDATORS[answer["draft"]]
        key = json.dumps([answer["draft"], answer["schema"]])
        if key not in known:
            registry = Registry(retrieve=retrieve)
            schema = json.loads(json.dumps(answer["schema"]), parse_float=Decimal)
            known[key] = kind(schema, registry=registry, format_checker=kind.FORMAT_CHECKER)
        errors = [error.validator for error in known[key].iter_errors(json.loads(answer["text"], parse_float=number))]
        is_dialect = set(errors) <= {"pattern"} and not answer["text"].isascii()
        yield DIALECT if errors and is_dialect else INVALID if errors else VALID, answer


def main() -> int:
    getcontext().prec = 1000  # the largest double modulo 0.01 takes more than 300 digits
    counts: Counter[str] = Counter()
    for result, answer in judge(Path(sys.argv[1]), Path(sys.argv[2])):
        counts[result] += 1
        if result == INVALID and counts[result] <= 12:
            print(json.dumps(answer)[:600], file=sys.stderr)
    print(json.dumps(dict(counts)))
    return 1 if counts[INVALID] else 0


if __name__ == "__main__":
    sys.exit(main())
