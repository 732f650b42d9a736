"""Recorded requests: lengths and shared prefixes, no token, and what a simulation reads from them."""

from array import array
from pathlib import Path

from headstart.core.batch import RequestStepOutput
from headstart.core.request import FinishReason, Request
from headstart.engine.request_recorder import RequestRecorder
from headstart.http.decision_log_writer import DecisionLog
from headstart.router.decision_log import DecisionRecord
from headstart.sim.sim_workload import read_decision_log_requests

BLOCK = 4


def request(name: str, *tokens: int, domain: bytes = b"") -> Request:
    return Request(name, array("i", tokens), domain=domain)


def answer(name: str, *tokens: int, ends: bool = False, cached: int = 0) -> RequestStepOutput:
    reason = FinishReason.LENGTH if ends else None
    return RequestStepOutput(name, token_ids=tokens, finish_reason=reason, num_cached_tokens=cached)


def test_a_request_is_recorded_when_it_has_ended() -> None:
    found: list[DecisionRecord] = []
    recorder = RequestRecorder(found.append)
    recorder.record_submitted([request("a", *range(10))], BLOCK, 1.0)
    recorder.record_output(answer("a", 77, cached=4), 2.0)
    recorder.record_output(answer("a", 78, 79, ends=True), 3.0)
    (one,) = found
    assert (one.at, one.first_token, one.finish) == (1.0, 2.0, 3.0)
    assert (one.prompt_tokens, one.output_tokens, one.block_size) == (10, 3, BLOCK)
    assert len(one.names) == 2 * 16, "the hashes of two full blocks"
    recorder.record_output(answer("a", 80, ends=True), 4.0)
    assert len(found) == 1


def test_a_stop_string_ends_a_request_and_one_without_output_is_left_out() -> None:
    found: list[DecisionRecord] = []
    recorder = RequestRecorder(found.append)
    recorder.record_submitted([request("a", 1, 2), request("b", 1, 2)], BLOCK, 0.0)
    recorder.record_output(answer("a", 5), 1.0)
    recorder.record_end("a", 2.0)
    recorder.record_end("b", 2.0)
    recorder.record_end("unknown", 2.0)
    assert [(one.output_tokens, one.finish) for one in found] == [(1, 2.0)]


def test_prefixes_are_shared_within_a_recording_and_a_domain_only() -> None:
    names: list[str] = []
    for _ in range(2):
        recorder = RequestRecorder(lambda record: names.append(record.names))
        same = tuple(range(8))
        asked = [request("a", *same), request("b", *same[:4], 9, 9, 9, 9), request("c", *same, domain=b"other")]
        recorder.record_submitted(asked, BLOCK, 0.0)
        for one in asked:
            recorder.record_output(answer(one.request_id, 1, ends=True), 1.0)
    a, b, c, again = names[:4]
    assert a[:16] == b[:16] and a[16:] != b[16:]
    assert a[:16] != c[:16] and a[:16] != again[:16]


def test_a_recording_is_a_workload(tmp_path: Path) -> None:
    log = DecisionLog(tmp_path / "requests.jsonl")
    recorder = RequestRecorder(log.enqueue)
    recorder.record_submitted([request("a", *range(4000, 4010))], BLOCK, 5.0)
    recorder.record_submitted([request("b", *range(4000, 4008))], BLOCK, 6.5)
    recorder.record_output(answer("b", 1, ends=True), 7.0)
    recorder.record_output(answer("a", 1, 2, ends=True), 8.0)
    log.close()

    first, second = read_decision_log_requests(tmp_path / "requests.jsonl")
    assert (first.at, first.prompt_tokens, first.output_tokens) == (0.0, 10, 2)
    assert (second.at, second.prompt_tokens, second.output_tokens) == (1.5, 8, 1)
    assert first.block_ids[:2] == second.block_ids and first.id_size == BLOCK
