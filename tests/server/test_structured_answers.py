"""`headstart serve` with schemas, sampled: finished answers are values of the schema, cut ones prefixes of one."""

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from llguidance import LLTokenizer
from server.harness import Server, spawn

from headstart_lab.structured.bounded import bounded
from headstart_lab.structured.checks import Checker, Result
from headstart_lab.structured.hostile_grammars import handmade
from headstart_lab.structured.serving import post_chat, schema_request
from headstart_lab.structured.suite import SuiteSchema

BYTES = LLTokenizer("byte")
REFUSED: tuple[dict[str, Any], ...] = (
    {"not": {"type": "string"}},
    {"if": {"type": "string"}, "then": {"minLength": 2}},
    {"type": "object", "propertyNames": {"maxLength": 3}},
    {"type": "array", "contains": {"type": "integer"}},
    {"type": "integer", "multipleOf": 999_983},
)
ACCEPTED: tuple[dict[str, Any], ...] = (
    {"type": "string", "minLength": 2},
    {"type": "integer", "minimum": -7, "exclusiveMaximum": 1000},
    {"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 50},
    {"type": "array", "items": {"enum": ["a", 1, None, {"x": []}]}, "minItems": 1, "maxItems": 4},
    {"type": "array", "prefixItems": [{"type": "boolean"}], "items": {"type": "null"}},
    {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}, "required": ["age"]},
    {"type": "object", "patternProperties": {"^k": {"type": "integer"}}, "additionalProperties": False},
    {"anyOf": [{"const": "déjà\n“vu”"}, {"type": "object", "properties": {"a": {}}, "required": ["a"]}]},
    {"allOf": [{"properties": {"a": {"minimum": 3}}}, {"type": "object", "required": ["a"]}]},
    {"type": "string", "pattern": "^[a-f]{2,5}\\d?$"},
    {"type": "string", "format": "uuid"},
    {"$defs": {"n": {"properties": {"n": {"$ref": "#/$defs/n"}}, "type": "object"}}, "$ref": "#/$defs/n"},
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("structured") / "log"
    with spawn([sys.executable, "-m", "headstart", "serve", "--port", "0", "--no-access-log"], log) as process:
        yield process.wait_ready()


def results(server: Server, schemas: tuple[dict[str, Any], ...]) -> Counter[Result]:
    """The checks of all answers: as sent and with bounds, greedy and drawn with two seeds."""
    drawn = [{"temperature": 1, "seed": seed, "n": 3, "max_tokens": 48} for seed in (1, 2)]
    counts: Counter[Result] = Counter()

    async def one(session: aiohttp.ClientSession, schema: Any, sent: Any, sampling: dict[str, Any]) -> None:
        checker = Checker(SuiteSchema("draft2020-12", "made", "made", schema, ()), sent, Path(), BYTES)
        body = json.dumps(schema_request(sent, **sampling)).encode()
        for answer in await post_chat(session, server.url, body):
            result = checker.check(answer)
            assert result in (Result.VALID, Result.PREFIX, Result.REFUSED), (result, sent, sampling, answer)
            counts[result] += 1

    async def run() -> None:
        async with aiohttp.ClientSession() as session:
            sends = [(schema, form(schema)) for schema in schemas for form in (lambda schema: schema, bounded)]
            samplings = [{"temperature": 0, "max_tokens": 48}, *drawn]
            await asyncio.gather(*(one(session, *send, sampling) for send in sends for sampling in samplings))

    asyncio.run(run())
    return counts


def test_sampled_answers_are_values_of_their_schema_or_prefixes_of_one(server: Server) -> None:
    counts = results(server, ACCEPTED)
    assert counts.total() == 2 * 7 * len(ACCEPTED) and counts[Result.REFUSED] == 0
    assert counts[Result.VALID] > counts.total() // 2


def test_schemas_that_are_not_supported_are_refused_by_keyword(server: Server) -> None:
    assert set(results(server, REFUSED)) == {Result.REFUSED}


def test_server_survives_the_hand_made_hostile_grammars(server: Server) -> None:
    async def run() -> Counter[int]:
        statuses: Counter[int] = Counter()
        async with aiohttp.ClientSession() as session:
            for case in handmade():
                sampling = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
                field = {"json": "json", "regex": "regex", "lark": "grammar"}[case.kind]
                value = json.loads(case.text) if case.kind == "json" else case.text
                body = json.dumps({"structured_outputs": {field: value}, **sampling}).encode()
                if len(body) < 3_900_000:
                    statuses.update(answer.status for answer in await post_chat(session, server.url, body))
        return statuses

    statuses = asyncio.run(run())
    assert set(statuses) <= {200, 400}, statuses
    assert statuses[400] > 50 and statuses[200] > 20
