"""Small samples of every format, and the recorded traces themselves where they are at hand."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.core.errors import ConfigError
from headstart.workload.jobs import perfect_cache_prefill_tokens
from headstart.workload.traces import Trace, TracedRequest, parse_trace

RECORDED = Path(__file__).parents[3] / "shared" / "traces"
MOONCAKE = [
    {"timestamp": 500, "input_length": 1000, "output_length": 8, "hash_ids": [0, 1]},
    {"timestamp": 2500, "input_length": 600, "output_length": 1, "hash_ids": [0, 2]},
    {"timestamp": 1500, "input_length": 1024, "output_length": 40, "hash_ids": [0, 1]},
]
AGENT = [
    {"timestamp": 1_700_000_001_000_000, "input": "a" * 40, "output": "done", "session_id": "x"},
    {"timestamp": 1_700_000_003_000_000, "input": "a" * 40 + "b" * 20, "output": "", "session_id": "x"},
]
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:50.9,96,9"


def lines(rows: list[dict]) -> list[str]:
    return [json.dumps(row) + "\n" for row in rows]


def common(a: object, b: object) -> int:
    """Tokens that both begin with."""
    pairs = list(zip(a, b, strict=False))  # type: ignore[call-overload]
    return next((i for i, (x, y) in enumerate(pairs) if x != y), len(pairs))


def test_mooncake_ids_become_the_same_tokens_wherever_they_occur() -> None:
    trace = parse_trace(lines(MOONCAKE))
    jobs = trace.to_jobs(32_000, 0)
    assert trace.kind == "mooncake"
    assert [(len(job.prompt), job.output, job.at) for job in jobs] == [(1000, 8, 0.0), (1024, 40, 1.0), (600, 1, 2.0)]
    assert common(jobs[0].prompt, jobs[1].prompt) == 1000
    assert common(jobs[0].prompt, jobs[2].prompt) == 512


def test_scaling_keeps_what_is_shared_and_makes_the_longest_fit() -> None:
    trace = parse_trace(lines(MOONCAKE))
    factor = trace.fitting_length_factor(256)
    jobs = trace.to_jobs(32_000, 0, factor=factor, speed=4.0)
    assert factor == 0.25 and trace.fitting_length_factor(0) == trace.fitting_length_factor(5000) == 1.0
    assert [(len(job.prompt), job.output, job.at) for job in jobs] == [(250, 2, 0.0), (256, 10, 0.25), (150, 1, 0.5)]
    assert common(jobs[0].prompt, jobs[2].prompt) == 128


def test_texts_that_begin_alike_become_tokens_that_begin_alike() -> None:
    trace = parse_trace(lines(AGENT))
    first, second = trace.to_jobs(32_000, 0)
    assert trace.kind == "agent" and (second.at, first.output, second.output) == (2.0, 1, 1)
    assert (len(first.prompt), len(second.prompt), common(first.prompt, second.prompt)) == (10, 15, 10)
    assert [len(job.prompt) for job in trace.to_jobs(32_000, 0, factor=0.5)] == [5, 8]


def test_azure_has_lengths_and_shares_nothing() -> None:
    trace = parse_trace(AZURE.splitlines(keepends=True))
    jobs = trace.to_jobs(32_000, 0)
    assert trace.kind == "azure"
    assert [(len(job.prompt), job.output) for job in jobs] == [(374, 44), (96, 9)]
    assert jobs[1].at == pytest.approx(4.21941)
    assert perfect_cache_prefill_tokens([job.prompt for job in jobs]) == 374 + 96


def test_another_seed_shares_the_same_way_and_nothing_with_the_first() -> None:
    for rows in (MOONCAKE, AGENT):
        trace = parse_trace(lines(rows))
        one, again, other = (trace.to_jobs(32_000, seed) for seed in (1, 1, 2))
        assert one == again
        assert [perfect_cache_prefill_tokens([job.prompt for job in jobs]) for jobs in (one, other)] == [
            perfect_cache_prefill_tokens([job.prompt for job in one])
        ] * 2
        assert common(one[0].prompt, other[0].prompt) == 0


def test_the_first_requests_are_those_that_came_first() -> None:
    trace = parse_trace(lines(MOONCAKE))
    assert [request.at for request in trace.first(2).requests] == [0.0, 1.0]
    assert trace.first(0) == trace


def test_long_prompts_can_be_left_out() -> None:
    trace = parse_trace(lines(MOONCAKE))
    assert [request.length for request in trace.up_to_length(1000).requests] == [1000, 600]
    assert trace.up_to_length(0) == trace
    with pytest.raises(ConfigError, match="no prompt of the trace has 599"):
        trace.up_to_length(599)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ("\n \n", "empty"),
        ("a,b\n1,2\n", "no trace in a known format"),
        ('{"a": 1}\n', r"keys \['a'\].*no trace"),
        ('{"hash_ids": [1], "input_length": 5\n', "line 1 of the trace is no JSON"),
        (json.dumps(MOONCAKE[0]) + "\n\n[1]\n", "line 3 of the trace is no JSON object"),
        (json.dumps(MOONCAKE[0]) + '\n{"timestamp": 1}\n', "line 2 of the trace is no mooncake request"),
        (json.dumps(MOONCAKE[0] | {"hash_ids": []}) + "\n" + json.dumps(MOONCAKE[0]), "no number of tokens per id"),
        (json.dumps(MOONCAKE[0] | {"input_length": 0}), "prompt of 0 tokens"),
        (json.dumps(AGENT[0] | {"input": ""}), "prompt of 0 tokens"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no requests"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nnow,1,2\n", "line 2 of the trace is no azure request"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,7\n", "line 2 of the trace is no azure request"),
    ],
)
def test_what_is_no_trace_is_refused_by_its_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_trace(text.splitlines(keepends=True))


@given(
    st.lists(st.text("ab", min_size=1, max_size=40), min_size=1, max_size=6), st.floats(0.05, 1.0), st.integers(0, 9)
)
def test_texts_share_tokens_exactly_as_far_as_their_pieces_are_equal(
    texts: list[str], factor: float, seed: int
) -> None:
    requests = tuple(TracedRequest(0.0, -(-len(text) // 4), 1, text=text) for text in texts)
    jobs = Trace("agent", requests).to_jobs(2**31 - 1, seed, factor=factor)
    for text, job in zip(texts, jobs, strict=True):
        assert 1 <= len(job.prompt) <= len(text) * factor / 4 + 1
        for other, other_job in zip(texts, jobs, strict=True):
            shared = common(job.prompt, other_job.prompt)
            assert abs(common(text, other) * factor / 4 - shared) <= 1 or text == other


@pytest.mark.skipif(not RECORDED.is_dir(), reason="the recorded traces are not at hand")
@pytest.mark.parametrize(
    ("name", "kind", "requests"),
    [
        ("mooncake_conversation_trace.jsonl", "mooncake", 12_031),
        ("agent_miniswe.jsonl", "agent", 402),
        ("agent_taubench.jsonl", "agent", 471),
        ("azure_llm_2023_code.csv", "azure", 8_819),
        ("azure_llm_2023_conv.csv", "azure", 19_366),
    ],
)
def test_recorded_traces_are_read_whole(name: str, kind: str, requests: int) -> None:
    with (RECORDED / name).open(encoding="utf-8", newline="") as file:
        trace = parse_trace(file)
    assert (trace.kind, len(trace.requests)) == (kind, requests)
    part = trace.first(40)
    jobs = part.to_jobs(32_000, 0, factor=part.fitting_length_factor(500))
    assert max(len(job.prompt) for job in jobs) <= 501 and all(job.prompt for job in jobs)
    if kind != "azure":
        prompts = [job.prompt for job in jobs]
        assert perfect_cache_prefill_tokens(prompts) < 0.98 * sum(len(prompt) for prompt in prompts)
