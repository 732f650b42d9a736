"""Admission: the size of a request, the bounds on it, and the budget that all requests share."""

import asyncio
import os
import signal
from array import array
from typing import Any

import pytest
from server.fake_engine import Gate
from server.harness import inside, unsent_bytes, until

from headstart.config.options import ServerOptions
from headstart.core.engine_info import EngineInfo
from headstart.core.errors import InvalidRequestError, QueueFullError
from headstart.core.request import Request
from headstart.http.byte_budget import ByteBudget, ByteLease
from headstart.openai.bounds import RequestBounds
from headstart.openai.engine_requests import RequestOrigin, build_requests
from headstart.openai.generation_params import GenerationParams, ParamsKind, parse_params
from headstart.server import request_limits as admission
from headstart.server.request_limits import (
    admitted_requests_byte_budget,
    bytes_at_admission,
    check_request_size,
    num_logprob_entries,
    num_possible_logprob_entries,
)

MILLION = 1 << 20
INFO = EngineInfo("m", "m", 1000, 128 * 1024, 16, 8192, 1, "float32", "cpu", 1, "none", (), "lpm")
BOUNDS = RequestBounds.for_engine(INFO, ServerOptions())


def asked(
    num_prompts: int, length: int, kind: ParamsKind = ParamsKind.COMPLETION, **values: Any
) -> tuple[list[Request], GenerationParams]:
    params = parse_params(values, BOUNDS, kind)
    prompt = array("i", [1]) * length
    return build_requests([prompt] * num_prompts, params, BOUNDS, RequestOrigin("r")), params


@pytest.mark.parametrize(
    ("num_prompts", "length", "values", "entries"),
    [
        (1, 10, {}, 0),
        (1, 10, {"logprobs": 0, "max_tokens": 5}, 5),
        (1, 10, {"logprobs": 4, "max_tokens": 5}, 25),
        (2, 10, {"logprobs": 4, "max_tokens": 5, "n": 3}, 150),
        (2, 10, {"echo": True, "n": 3}, 60),
        (2, 10, {"echo": True, "n": 3, "logprobs": 4, "max_tokens": 5}, 6 * (10 + 5) * 5),
        (2, 10, {"prompt_logprobs": 1, "n": 3}, 2 * 3 * 10 * 2),
        (1, 10, {"echo": True, "logprobs": 1, "prompt_logprobs": 3, "max_tokens": 5}, 10 * 4 + 5 * 2),
    ],
)
def test_entries_of_an_answer(num_prompts: int, length: int, values: dict[str, Any], entries: int) -> None:
    assert num_possible_logprob_entries(*asked(num_prompts, length, **values)) == entries


REASONABLE: list[tuple[int, int, dict[str, Any]]] = [
    (1, 100_000, {"logprobs": 20, "max_tokens": 28_000}),
    (64, 4096, {"echo": True, "logprobs": 5, "max_tokens": 1}),
    (64, 32 * 1024, {"echo": True, "logprobs": 1, "max_tokens": 1}),
    (32, 32 * 1024, {"echo": True, "logprobs": 5, "max_tokens": 0}),
    (1, 127_000, {"echo": True, "logprobs": 20, "max_tokens": 16}),
    (1, 127_000, {"n": 16, "max_tokens": 1000}),
    (64, 1024, {"n": 16, "max_tokens": 4096}),
    (8, 2300, {"n": 16, "echo": True, "logprobs": 20}),
    (1, 4000, {"n": 16, "logprobs": 5, "max_tokens": 100_000}),
]


@pytest.mark.parametrize(("num_prompts", "length", "values"), REASONABLE)
def test_reasonable_requests_are_within_the_bounds(num_prompts: int, length: int, values: dict[str, Any]) -> None:
    check_request_size(*asked(num_prompts, length, **values), BOUNDS)


@pytest.mark.parametrize("values", [{}, {"logprobs": True, "top_logprobs": 20}, {"logprobs": True, "n": 16}])
def test_a_chat_with_open_max_tokens_is_within_the_bounds(values: dict[str, Any]) -> None:
    check_request_size(*asked(1, 10, ParamsKind.CHAT, **values), BOUNDS)


@pytest.mark.parametrize(
    ("num_prompts", "length", "values", "param", "words"),
    [
        (64, 8192, {"n": 16}, "n", f"{64 * 8192 * 16} tokens, counted once for each of 16 choices; .* {4 * MILLION}"),
        (64, 100_000, {}, "prompt", f"at most {4 * MILLION}: send fewer prompts"),
        (64, 1024, {"n": 16, "echo": True, "logprobs": 20}, "logprobs", f"limit is {16 * MILLION}: lower max_tokens"),
        (1, 10, {"n": 16, "logprobs": 20, "max_tokens": 100_000}, "logprobs", "lower max_tokens, n or logprobs"),
    ],
)
def test_what_is_larger_is_refused_with_the_limit_and_a_remedy(
    num_prompts: int, length: int, values: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        check_request_size(*asked(num_prompts, length, **values), BOUNDS)
    assert (caught.value.param, caught.value.code) == (param, "request_too_large")


def test_what_is_shown_is_no_more_than_what_was_bounded() -> None:
    requests, params = asked(2, 10, echo=True, logprobs=4, max_tokens=5, n=3)
    assert num_logprob_entries(20, 6 * 5, params) == num_possible_logprob_entries(requests, params)
    requests, params = asked(1, 10, max_tokens=5)
    assert num_logprob_entries(10, 5, params) == 0


def test_bytes_of_an_echo_are_held_once_per_prompt() -> None:
    def held(n: int, **values: Any) -> int:
        return bytes_at_admission(*asked(1, 4000, n=n, max_tokens=1, **values))

    per_choice = held(2) - held(1)
    echo = held(1, echo=True, logprobs=20) - held(1)
    assert echo > 4000 * 21 * admission.ENTRY_BYTES
    assert held(16, echo=True, logprobs=20) < held(1) + 15 * per_choice + 4 * echo


def test_a_budget_refuses_what_exceeds_it_but_not_what_is_alone() -> None:
    budget = ByteBudget(100, "things")
    alone = budget.lease(1000)
    with pytest.raises(
        QueueFullError, match="1000 bytes of things are held, this one needs 1 more and the limit is 100"
    ):
        budget.lease(1)
    alone.grow(1)
    alone.release()
    alone.release()
    assert budget.held_bytes == 0
    first, second = budget.lease(60), budget.lease(40)
    with pytest.raises(QueueFullError):
        first.grow(1)
    second.force_resize(500)
    assert budget.held_bytes == 560 and first.num_bytes == 60
    second.release()
    first.grow(40)
    assert budget.held_bytes == 100


def test_the_budget_grows_with_the_pool_and_the_queue() -> None:
    small, large = (admitted_requests_byte_budget(INFO, ServerOptions(max_num_queued_tokens=n)) for n in (1, 1_000_001))
    assert large - small == 1_000_000 * 22 and small > 96 * MILLION


def test_servers_and_router_of_one_command_divide_the_budget_but_for_the_pools() -> None:
    options = ServerOptions()
    pool = 2 * INFO.num_blocks * INFO.block_size * 22
    whole, half = (admitted_requests_byte_budget(INFO, options, n) for n in (1, 2))
    assert half - pool == (whole - pool) // 2 > 48 * MILLION


def test_over_the_budget_is_429_until_a_request_ends(folder: str, gate: Gate) -> None:
    async def run() -> None:
        async with inside(gate.holds(folder, 1)) as server:
            server.state._held.max_bytes = 30_000
            body = {"max_tokens": 2, "logprobs": 2}
            first = asyncio.create_task(server.complete([7] * 100, n=16, **body))  # alone: admitted, whatever its size
            await until(lambda: server.state.num_jobs == 1)
            assert server.state._held.held_bytes > 30_000
            refused = await server.complete([7], **body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
            assert int(refused.headers["retry-after"]) >= 1
            gate.open()
            assert (await first).status_code == 200
            assert server.state._held.held_bytes == 0
            assert (await server.complete([7], **body)).status_code == 200
            assert (await server.complete([7], stream=True, **body)).status_code == 200
            assert (await server.complete([7], stop="x" * 300, **body)).status_code == 400
            assert server.state._held.held_bytes == 0

    asyncio.run(run())


def test_output_is_held_as_it_comes(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "RESERVED_TOKENS", 4)
    monkeypatch.setattr("headstart.server.generation_job.RESERVED_TOKENS", 4)

    async def run() -> None:
        async with inside(folder) as server:
            budget, most = server.state._held, 0
            resize = ByteLease.force_resize

            def watched(lease: ByteLease, num_bytes: int) -> None:
                nonlocal most
                resize(lease, num_bytes)
                most = max(most, budget.held_bytes)

            monkeypatch.setattr(ByteLease, "force_resize", watched)
            requests, params = asked(1, 1, max_tokens=300, logprobs=2)
            assert (await server.complete([7], max_tokens=300, logprobs=2)).status_code == 200
            held = bytes_at_admission(requests, params) + admission.bytes_of_params(params)
            assert most == held + 296 * admission.bytes_per_output_token(params)
            assert budget.held_bytes == 0

    asyncio.run(run())


def test_requests_that_are_given_up_leave_nothing_before_an_engine_that_hangs(folder: str) -> None:
    async def run() -> None:
        async with inside(f"{folder}?length=100000") as server:
            engine, prompt = server.engine, [7] * 50_000
            assert engine.pid is not None
            os.kill(engine.pid, signal.SIGSTOP)
            try:
                for _ in range(20):
                    asked = asyncio.create_task(server.complete(prompt))
                    await until(lambda: server.state.num_jobs == 1)
                    asked.cancel()
                    await asyncio.gather(asked, return_exceptions=True)
                    assert server.state.num_jobs == 0
                assert 100_000 < unsent_bytes(engine) < 2 * len(prompt) * 4  # of 20, two at most were handed over
            finally:
                os.kill(engine.pid, signal.SIGCONT)
            await until(lambda: unsent_bytes(engine) == 0)
            assert (await server.complete(prompt, max_tokens=1)).status_code == 200

    asyncio.run(run())
