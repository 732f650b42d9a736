"""The header in which a server reports the usage of an answer before its body."""

from typing import Any

import pytest
from server.harness import inside, parse_events

from headstart.http.answer_report import decode_report_header


def run(coroutine: Any) -> Any:
    import asyncio

    return asyncio.run(coroutine)


@pytest.mark.parametrize("stream", [False, True])
def test_the_report_is_the_usage_of_the_answer(stream: bool, folder: str) -> None:
    async def test() -> None:
        async with inside(folder) as server:
            body = {"prompt": list(range(1, 100)), "max_tokens": 4, "stream": stream}
            body |= {"stream_options": {"include_usage": True}} if stream else {}
            for cached in (0, 96):
                headers = {"x-headstart-report": "1"}
                response = await server.client.post("/v1/completions", json=body, headers=headers)
                report = decode_report_header((n.lower(), v) for n, v in response.headers.raw)
                assert report is not None and (report.prompt_tokens, report.cached_tokens) == (99, cached)
                assert report.prefill_ms >= 0
                document = parse_events(response.text)[-2] if stream else response.json()
                assert report.answer_id == document["id"]
                assert document["usage"]["prompt_tokens_details"]["cached_tokens"] == cached

    run(test())


def test_a_client_that_does_not_ask_gets_no_report(folder: str) -> None:
    async def test() -> None:
        async with inside(folder) as server:
            response = await server.client.post("/v1/completions", json={"prompt": [1, 2, 3], "max_tokens": 2})
            assert response.status_code == 200 and "x-headstart-report" not in response.headers

    run(test())
