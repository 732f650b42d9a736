"""The recorder of exchanges: what it sends, and which differences it sees."""

from collections import Counter
from typing import Any

from exchanges.corpus import exchanges
from exchanges.record import differences

EVENT = 'data: {"id":"chatcmpl-%s","created":%d,"choices":[{"delta":{"content":"%s"}}]}\n\n'


def line(body: str, **more: Any) -> dict[str, Any]:
    return {"via": "server", "name": "one", "status": 200, "headers": [["x-request-id", "req-1"]], "body": body, **more}


def test_each_api_gets_about_five_hundred_requests_and_the_other_routes_some() -> None:
    counts = Counter(exchange.path.split("?")[0] for exchange in exchanges())
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"):
        assert counts[path] >= 500
    assert counts["/api/chat"] > 350
    assert {"/v1/cache/explain", "/v1/models", "/v1/prefixes", "/openapi.json", "/tokenize"} < set(counts)


def test_ids_and_times_are_no_difference() -> None:
    one, other = (line(EVENT % (40 * digit, 1_700_000_000 + int(digit), "a")) for digit in "12")
    assert differences([one], [other]) == []


def test_times_in_a_header_are_no_difference() -> None:
    one, other = (
        line("", headers=[["server-timing", timing]]) for timing in ("route;dur=0.3", "prefill;dur=1, decode")
    )
    assert differences([one], [other]) == []


def test_texts_statuses_headers_and_repeated_ids_are() -> None:
    first, second = "1" * 40, "2" * 40
    one = line(EVENT % (first, 1, "a") + EVENT % (first, 1, "b"))
    for other in (
        line(EVENT % (first, 1, "a") + EVENT % (second, 1, "b")),
        line(EVENT % (first, 1, "a") + EVENT % (first, 1, "c")),
        {**one, "status": 400},
        {**one, "headers": []},
        {**one, "name": "other"},
    ):
        assert differences([one], [other])
