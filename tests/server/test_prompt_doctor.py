"""AvoidableTextEstimator: the avoidable share of sampled prompts, by cause and tenant, with bounded memory and CPU
time."""

import asyncio
import gc
import json
import tracemalloc
from typing import Any

import pytest
from server.harness import PATIENCE

from headstart.core.batch import PromptTokenBreakdown
from headstart.core.engine_info import EngineStats
from headstart.core.sched.token_accounting import TokenCounters
from headstart.openai.engine_requests import RequestOrigin
from headstart.reuse.log_report import lint_report
from headstart.reuse.logged_prompt import logged_prompt_of_entry
from headstart.reuse.near_prompts import PromptWindow, WindowEntry, measure_avoidable_text
from headstart.server.prompt_doctor import FREE_SECONDS, AvoidableTextEstimator
from headstart.server.request_limits import bytes_of_json_value
from headstart.server.statistics import compute_prefix_losses

RULES = "".join(f"Rule {number}: answer with one word, and never guess the name of a river.\n" for number in range(40))


def messages(front: str, question: str = "Which one is it?") -> list[dict[str, Any]]:
    return [{"role": "system", "content": front + RULES}, {"role": "user", "content": question}]


def tokens_of(sent: list[dict[str, Any]]) -> int:
    return sum(len(message["content"]) for message in sent) // 4


async def ask(
    doctor: AvoidableTextEstimator,
    front: str,
    cached: int = 0,
    evicted: int = 0,
    tenant: str = "",
    salt: str | None = None,
) -> None:
    sent = messages(front)
    num_tokens = tokens_of(sent)
    entry = doctor.build_window_entry(
        RequestOrigin("id", tenant=tenant, domain=tenant.encode()), salt, sent, (), num_tokens
    )
    assert entry is not None
    doctor.remember_prompt(entry)
    doctor.examine_finished(tenant, entry, PromptTokenBreakdown(shared=cached, computed=num_tokens - cached), evicted)
    async with asyncio.timeout(PATIENCE):
        while doctor.is_busy:
            await asyncio.sleep(0.001)


def day(number: int) -> str:
    return f"Now it is 2026-11-{number:02d} 10:{number:02d}:11, a day like others.\n"


def test_a_timestamp_at_the_front_is_avoidable_and_named() -> None:
    async def go() -> AvoidableTextEstimator:
        doctor = AvoidableTextEstimator(1.0, lambda: 0.0)
        for number in range(1, 11):
            await ask(doctor, day(number))
        return doctor

    counts = asyncio.run(go()).counts
    assert counts.num_requests == 10 and set(counts.causes) == {"timestamp"}
    assert counts.share is not None and 0.8 < counts.share < 0.95  # all but the first prompt, and its front


def test_control_prompts_with_equal_fronts_lose_nothing() -> None:
    async def go() -> AvoidableTextEstimator:
        doctor = AvoidableTextEstimator(1.0, lambda: 0.0)
        for number in range(10):
            await ask(doctor, "", cached=0 if number == 0 else tokens_of(messages("")) - 8)
        return doctor

    counts = asyncio.run(go()).counts
    assert (counts.num_requests, counts.avoidable_tokens, dict(counts.causes)) == (10, 0, {})


def test_what_was_evicted_is_not_avoidable() -> None:
    async def go(evicted: int) -> int:
        doctor = AvoidableTextEstimator(1.0, lambda: 0.0)
        await ask(doctor, day(1))
        await ask(doctor, day(2), evicted=evicted)
        return doctor.counts.avoidable_tokens

    whole = asyncio.run(go(0))
    num_tokens = tokens_of(messages(day(2)))
    assert whole > 600 and asyncio.run(go(num_tokens - 100)) <= 100


def test_the_estimate_is_that_of_lint() -> None:
    """The same prompts as a log: avoidable tokens differ by rounding only, since nothing is reused in either."""

    async def go() -> int:
        doctor = AvoidableTextEstimator(1.0, lambda: 0.0)
        for number in range(1, 6):
            await ask(doctor, day(number))
        return doctor.counts.avoidable_tokens

    report = lint_report(
        [one for number in range(1, 6) if (one := logged_prompt_of_entry(number, {"messages": messages(day(number))}))]
    )
    assert report.avoidable_tokens > 2000
    assert asyncio.run(go()) == pytest.approx(report.avoidable_tokens, rel=0.02)


def test_prompts_of_other_tenants_and_salts_are_never_compared() -> None:
    async def go() -> AvoidableTextEstimator:
        doctor = AvoidableTextEstimator(1.0, lambda: 0.0)
        await ask(doctor, day(1), tenant="ann")
        await ask(doctor, day(2), tenant="bob")
        await ask(doctor, day(3), tenant="ann", salt="x")
        assert doctor.counts.avoidable_tokens == 0
        await ask(doctor, day(4), tenant="ann")  # positive control
        return doctor

    doctor = asyncio.run(go())
    assert doctor.tenants["ann"].avoidable_tokens == doctor.counts.avoidable_tokens > 500
    assert doctor.tenants["bob"].avoidable_tokens == 0
    assert "river" not in repr(doctor.counts) + repr(doctor.tenants)


def test_cpu_time_is_bounded_by_its_share() -> None:
    async def go(used: float) -> int:
        doctor = AvoidableTextEstimator(0.005, lambda: used)
        doctor.spent_seconds = FREE_SECONDS + 0.5
        await ask(doctor, day(1))
        return doctor.counts.num_requests

    assert asyncio.run(go(99.0)) == 0 and asyncio.run(go(101.0)) == 1


def test_without_a_share_nothing_is_kept() -> None:
    assert (
        AvoidableTextEstimator(0.0, lambda: 1e9).build_window_entry(RequestOrigin("id"), None, messages(""), (), 100)
        is None
    )


def test_the_window_is_bounded_and_drops_the_oldest() -> None:
    window = PromptWindow(64 * 1024)
    entries = [entry_of(messages(day(1 + number % 28))) for number in range(40)]
    for entry in entries:
        assert window.add(entry)
    assert window.num_bytes <= 64 * 1024 and 3 < len(window) < 16
    assert window.earlier_in_group(entries[0]) == [] and entries[-2] in window.earlier_in_group(entries[-1])
    assert (
        entries[-1].to_logged_prompt.messages and not entries[0].to_logged_prompt.messages
    )  # what was dropped holds nothing
    assert not window.add(WindowEntry(b"g", messages(""), (), num_tokens=1, num_bytes=100_000))


def test_a_prompt_is_charged_what_it_holds_in_memory() -> None:
    """Its tokens say nothing: the template may drop texts, and a character takes up to four bytes."""
    thought = {"role": "assistant", "content": "b", "reasoning_content": "c" * 400_000}
    wide = {"role": "user", "content": "\U0001f43b" + "d" * 100_000}
    calls = [{"id": str(n), "type": "function", "function": {"name": "f", "arguments": "{}"}} for n in range(800)]
    pieces = {"role": "user", "content": "".join(f"a line of 24 characters {n:05d}.\n" for n in range(9000))}
    tools = [{"type": "function", "function": {"name": f"f{n}", "parameters": {"a": [[], {}, n]}}} for n in range(500)]
    for sent in ([thought], [wide], [{"role": "assistant", "content": "", "tool_calls": calls}], [pieces], []):
        text = json.dumps([sent or [{"role": "user", "content": "x"}], [] if sent else tools])
        gc.collect()
        tracemalloc.start()
        values: list[Any] = json.loads(text)
        doctor = AvoidableTextEstimator(1.0, lambda: 0.0)
        entry = doctor.build_window_entry(RequestOrigin("id"), None, *values, 1)
        assert entry is not None and (not sent or entry.piece_hashes is not None)
        del values
        gc.collect()
        held = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert 0.3 * entry.num_bytes < held <= 1.05 * entry.num_bytes, text[:60]
    assert (
        doctor.build_window_entry(RequestOrigin("id"), None, [{**thought, "reasoning_content": "c" * (2 << 20)}], (), 1)
        is None
    )


def entry_of(sent: list[dict[str, Any]]) -> WindowEntry:
    return WindowEntry(b"g", sent, (), num_tokens=800, num_bytes=bytes_of_json_value(sent))


def test_a_prompt_that_nothing_is_like_has_nothing_avoidable() -> None:
    window = PromptWindow(1 << 20)
    first, other = (
        entry_of([{"role": "user", "content": text * 40}])
        for text in ("One sentence about ships and the sea. ", "Another text, on mountains, snow and ice. ")
    )
    assert window.add(first) and window.add(other)
    assert measure_avoidable_text(other, window.earlier_in_group(other), 0)[1].num_chars == 0


def stats(prompt: int, computed: int, evicted: int) -> EngineStats:
    return EngineStats(TokenCounters(prompt_tokens=prompt, prompt_computed_tokens=computed, evicted_tokens=evicted))


def test_the_statistics_line_says_what_was_not_reused_and_why() -> None:
    found = compute_prefix_losses(stats(1000, 100, 0), stats(2000, 840, 40), (500, 0), (1000, 305))
    assert found is not None and found.text() == "not reused 74 %: changing front 61, new 9, evicted 4"
    assert found.share_fields() == {"evicted_share": 0.04, "avoidable_share": 0.61}


def test_the_shares_of_causes_add_up_even_if_the_sample_says_more() -> None:
    found = compute_prefix_losses(stats(0, 0, 0), stats(1000, 300, 50), (0, 0), (100, 90))
    assert found is not None and found.text() == "not reused 30 %: changing front 25, new 0, evicted 5"


def test_without_a_sample_no_front_is_named() -> None:
    found = compute_prefix_losses(stats(0, 0, 0), stats(1000, 300, 50), (0, 0), (0, 0))
    assert found is not None and found.text() == "not reused 30 %: new 25, evicted 5"
    assert compute_prefix_losses(stats(5, 5, 0), stats(5, 5, 0), (0, 0), (0, 0)) is None
