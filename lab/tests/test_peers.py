"""benchmarks/peers: protocol, turns and journal, with drivers that compute nothing."""

import os
import signal
import sys
import threading
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

PEERS = Path(__file__).parents[2] / "benchmarks" / "peers"
sys.path.insert(0, str(PEERS))

import peer as peer_module  # noqa: E402
from comparison import Comparison, Site  # noqa: E402
from journal import Entry, Journal, find, read  # noqa: E402
from peer import GivenUpError, LateError, Peer, PeerError  # noqa: E402
from plan import ONCE, Plan, Repetitions  # noqa: E402
from roster import ROSTER, Entrant, variables_of  # noqa: E402
from run import interrupt  # noqa: E402
from serve import GIVEN_UP, GREEDY, Job, News, Sampling, drive  # noqa: E402

from headstart.workload import jobs  # noqa: E402
from headstart.workload.jobs import jobs_from_prompts  # noqa: E402
from headstart_lab.comparison import SAMPLED  # noqa: E402

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
if sys.argv[-1] == "uncounted":
    ready["reports_cached"] = False
serve(answers, ready, lambda: True, lambda jobs, concurrency, limit: drive(engine, jobs, concurrency, limit))
"""


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
    trial = peer.run(jobs_from_prompts([array("i", [7, 8, 9]), array("i", [5])], 4), concurrency=1)
    assert (peer.label, peer.vocab_size, peer.about["versions"]) == ("fake", 100, {"torch": "1"})
    assert [(one.prompt_tokens, one.output_tokens) for one in trial.records] == [(3, 4), (1, 4)]
    assert all(record.ok for record in trial.records) and peer.try_clear_prefix_cache() and peer.cpu_seconds() > 0


def test_how_a_job_is_sampled_reaches_the_engine() -> None:
    class Noted(Steps):
        asked: ClassVar[list[Sampling]] = []

        def add(self, request_id: str, prompt: list[int], output: int, sampling: Sampling) -> None:
            self.asked.append(sampling)
            super().add(request_id, prompt, output, sampling)

    drive(Noted(), [Job([7], 1, 0.0), Job([7], 1, 0.0, Sampling(1.0, 0.9, 5))])
    assert Noted.asked == [GREEDY, Sampling(temperature=1.0, top_p=0.9, top_k=5)]


def test_a_driver_may_not_know_its_cached_tokens(driver: Path, tmp_path: Path, peer: Peer) -> None:
    jobs = jobs_from_prompts([array("i", [7, 8])], 1)
    assert peer.run(jobs).computed_prompt_tokens == 2
    uncounted = Peer([sys.executable, str(driver), "uncounted"], tmp_path / "log")
    assert uncounted.run(jobs).computed_prompt_tokens is None
    uncounted.close()


def test_a_driver_is_told_how_to_sample(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []
    ask = peer._ask
    monkeypatch.setattr(peer, "_ask", lambda message: told.append(message) or ask(message))
    chosen = jobs.TokenSampling(temperature=1.0, top_p=0.9, top_k=5)
    assert peer.run(jobs_from_prompts([array("i", [7])], 2, sampling=chosen)).records[0].ok
    assert told[0]["jobs"][0]["sampling"] == {"temperature": 1.0, "top_p": 0.9, "top_k": 5}


def test_sampled_rows_are_served_by_those_who_sample() -> None:
    plan = Plan(tuple(ROSTER.values()), tuple(SAMPLED))
    for row in plan.rows:
        assert {entrant.name for _, entrant in plan.turns(row)} == {
            "ours",
            "vllm",
            "vllm_float32",
            "ours_int8",
            "openvino",
        }


def test_what_a_driver_prints_is_in_its_log_and_not_in_its_answers(peer: Peer) -> None:
    peer.run(jobs_from_prompts([array("i", [7])], 1))
    peer.close()
    assert "noise" in peer.log.read_text()


def test_a_peer_that_gave_up_serves_the_next_run(peer: Peer) -> None:
    peer.deadline = time.monotonic() + 0.05
    with pytest.raises(GivenUpError):
        peer.run(jobs_from_prompts([array("i", [2])], 1))
    peer.deadline = None
    assert peer.run(jobs_from_prompts([array("i", [7])], 2)).records[0].output_tokens == 2


def test_a_driver_that_dies_is_reported_with_its_exit_code(peer: Peer) -> None:
    with pytest.raises(PeerError, match="code 7"):
        peer.run(jobs_from_prompts([array("i", [1])], 1))
    with pytest.raises(PeerError):
        peer.try_clear_prefix_cache()


def test_a_driver_that_hangs_is_killed_with_its_children(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_module, "GRACE_SECONDS", 0.2)
    peer.deadline = time.monotonic() + 0.1
    with pytest.raises(LateError):
        peer.run(jobs_from_prompts([array("i", [3])], 1))
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


def test_a_driver_that_dies_costs_its_own_row_only(driver: Path, tmp_path: Path) -> None:
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
