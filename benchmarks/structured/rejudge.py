"""Judge kept answers by Python's `jsonschema`, a second validator: rejudge.py ANSWERS.jsonl SUITE.

ANSWERS.jsonl is the file of sampled.py --keep, SUITE the folder of the JSON-Schema-Test-Suite (for remote references).
Needs `jsonschema[format-nongpl]` and nothing of Headstart, so it runs in an environment of its own. Numbers beyond the
doubles are read as the largest double, as in checks.py. Exits with 1 if an answer is not valid.
"""

import json
import math
import sys
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

from jsonschema import Draft7Validator, Draft202012Validator
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

VALIDATORS = {"draft2020-12": Draft202012Validator, "draft7": Draft7Validator}
REMOTE = "http://localhost:1234/"
LARGEST = Decimal("1.7976931348623157e308")


def number(digits: str) -> Decimal:
    """Return a number as a decimal: a double is no multiple of 0.01 any more after 17 digits."""
    return Decimal(digits) if math.isfinite(float(digits)) else LARGEST.copy_sign(Decimal(digits))


def judge(path: Path, suite: Path) -> Iterator[tuple[bool, dict[str, Any]]]:
    """Yield for every answer whether it is valid, and the answer."""

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
        yield known[key].is_valid(json.loads(answer["text"], parse_float=number)), answer


def main() -> int:
    counts: Counter[str] = Counter()
    for is_valid, answer in judge(Path(sys.argv[1]), Path(sys.argv[2])):
        counts["valid" if is_valid else "invalid"] += 1
        if not is_valid and counts["invalid"] <= 12:
            print(json.dumps(answer)[:600], file=sys.stderr)
    print(json.dumps(dict(counts)))
    return 1 if counts["invalid"] else 0


if __name__ == "__main__":
    sys.exit(main())
