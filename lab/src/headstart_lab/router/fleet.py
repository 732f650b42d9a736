"""Real replicas behind a real router: shared prefixes with high and low hit, decode-heavy chats; policies by turns.

`headstart serve` processes of one thread each, whose pools hold a third of the groups' prefixes each, so that placement
matters. They stay up; before each run their caches are cleared and a fresh router is started in front of them. All
routers of one run get the same texts at the same arrival times of a Poisson process; the time to the first token is
measured by the client, from the arrival time of a request. The report is made by fleet_report.py.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from headstart.bench.streamed_request import (
    EndpointTarget,
    PreparedRequest,
    StreamedReply,
    StreamFailedError,
    open_session,
    request_body_of_job,
    send_streamed_request,
)
from headstart.core.errors import ConfigError
from headstart.measurement.machine import ContentionMeter
from headstart.measurement.progress_bar import QUIET, ProgressBar
from headstart.measurement.runner import EngineSetup
from headstart.workload.jobs import Job
from headstart.workload.request_record import RequestRecord
from headstart_lab.router.fleet_trial import BASELINE, BLOCK_SIZE, TITLES, FleetConfig, Measured, Trial
from headstart_lab.router.fleet_workload import Question, Words, make_questions
from headstart_lab.runners.route_process import Entrant, RouterProcess, running_router
from headstart_lab.runners.served_replica import Launch, Replica, replica

WARM_UPS = 8  # requests of less than a block through every router before its run: connections, first calls of code
LOADED = 2  # requests in flight per replica while the capacity of round robin is measured
PATIENCE = 30.0  # seconds


def measure_fleet(setup: EngineSetup, config: FleetConfig, bar: ProgressBar = QUIET) -> Measured:
    """Start the replicas and run every router on each workload `config.runs` times, in turn. Raises ConfigError."""
    config.check()
    entrants, words = config.entrants(), Words.of_model(setup.model)
    measured = Measured({kind: {entrant.name: [] for entrant in entrants} for kind in config.kinds})
    with TemporaryDirectory(prefix="headstart-fleet-") as scratch, ExitStack() as stack:
        launch = replica_launch(setup, config, Path(scratch))
        replicas: list[Replica] = []
        bar.start_stage("starting replicas", config.replicas)
        for _ in range(config.replicas):
            replicas.append(stack.enter_context(replica(launch, None)))
            bar.advance()
        fleet = _Fleet(setup, config, words, replicas, Path(scratch), measured, bar)
        fleet.settle_rates()
        for run in range(config.runs):
            turn = entrants[run % len(entrants) :] + entrants[: run % len(entrants)]
            for kind in config.kinds:
                for entrant in turn:
                    measured.trials[kind][entrant.name].append(fleet.run(entrant, kind, run))
    return measured


class _Fleet:
    """Running replicas, and the measurements with them."""

    def __init__(
        self,
        setup: EngineSetup,
        config: FleetConfig,
        words: Words,
        replicas: Sequence[Replica],
        scratch: Path,
        measured: Measured,
        bar: ProgressBar,
    ) -> None:
        self.setup, self.config, self.words = setup, config, words
        self.replicas, self.scratch, self.measured, self.bar = replicas, scratch, measured, bar
        self.model = replicas[0].served_model()  # some routers do not list it

    def settle_rates(self) -> None:
        """Set the requested rates, or a share of the measured capacity of round robin."""
        for kind in self.config.kinds:
            rate = self.config.rates[kind]
            if rate == 0.0:
                questions = self._questions(kind, "load", 1.0)
                self.bar.start_stage(f"{TITLES[kind]}: capacity of {BASELINE}", len(questions))
                trial = self._serve(Entrant(BASELINE, policy=BASELINE), questions, LOADED * len(self.replicas))
                seconds = max((record.finish or 0.0 for record in trial.records), default=0.0)
                if trial.errors or seconds <= 0.0:
                    raise ConfigError(f"the fleet does not serve: {trial.errors[:1]}")
                self.measured.borne[kind] = len(trial.records) / seconds
                rate = self.config.load * self.measured.borne[kind]
            self.measured.rates[kind] = rate

    def run(self, entrant: Entrant, kind: str, run: int) -> Trial:
        """Run one router on one workload; texts and arrivals depend only on the run."""
        questions = self._questions(kind, str(run), self.measured.rates[kind])
        self.bar.start_stage(f"{TITLES[kind]}, {entrant.name}, run {run + 1} of {self.config.runs}", len(questions))
        meter, before = ContentionMeter(), self._cpu_seconds()
        meter.start()
        try:
            trial = self._serve(entrant, questions, 0)
        except ConfigError as error:  # the others are still measured, and the report includes the error
            trial = Trial((RequestRecord("start", 0.0, None, None, 0, 0, 0, error=str(error)),), ())
        self.measured.log.kept.append(
            meter.cores_used_by_others(self._cpu_seconds() - before)
        )  # routers have ended, so their CPU time is included
        return trial

    def _questions(self, kind: str, name: str, rate: float) -> list[Question]:
        return make_questions(self.words, self.config, kind, rate, Random(f"{self.setup.seed}/{kind}/{name}"))

    def _serve(self, entrant: Entrant, questions: Sequence[Question], concurrency: int) -> Trial:
        """Clear all caches, start the router, send the questions through it, stop it."""
        decisions = self.scratch / f"decisions-{time.monotonic_ns()}.jsonl"
        if entrant.environment is None:
            flags = ("--decision-log", str(decisions), "--tokenizer", self.setup.model)
            entrant = Entrant(entrant.name, None, entrant.policy, (*entrant.flags, *flags))
        urls = [one.url for one in self.replicas]
        self._reset()
        with running_router(entrant, urls, self.scratch) as router:
            cpu = router.cpu_seconds()
            warm = [Question(*self._short(), group=-1) for _ in range(WARM_UPS)]
            failed = [reply.record.error for reply in self._send(router, warm, 1, QUIET) if reply.record.error]
            if failed:
                raise ConfigError(f"{entrant.name} does not serve: {failed[0]}; its log ends {router.log[-300:]}")
            before = self._prompt_tokens()
            replies = self._send(router, questions, concurrency, self.bar)
            counts = [now - then for now, then in zip(self._prompt_tokens(), before, strict=True)]
            cpu, version = router.cpu_seconds() - cpu, router.version
        return Trial(
            tuple(reply.record for reply in replies),
            tuple(count / max(sum(counts), 1) for count in counts),
            _prediction_errors(decisions),
            cpu,
            version,
        )

    def _short(self) -> tuple[str, Job]:
        text = self.words.draw(BLOCK_SIZE // 2, Random(0))
        return "".join(text), Job(self.words.ids(text), 2)

    def _send(
        self, router: RouterProcess, questions: Sequence[Question], concurrency: int, bar: ProgressBar
    ) -> list[StreamedReply]:
        return asyncio.run(send_all(EndpointTarget(router.url, self.model), questions, concurrency, bar))

    def _reset(self) -> None:
        """Clear all caches once no request is in flight: a router may end before its requests do."""
        deadline = time.monotonic() + PATIENCE
        for one in self.replicas:
            while True:
                try:
                    one.reset_prefix_cache()
                    break
                except StreamFailedError as error:
                    if time.monotonic() > deadline:
                        raise ConfigError(f"a replica does not clear its cache: {error}") from error
                    time.sleep(0.05)

    def _prompt_tokens(self) -> list[int]:
        """Return the prompt tokens of each replica so far."""
        return [sum(one.prompt_tokens().values()) for one in self.replicas]

    def _cpu_seconds(self) -> float:
        return sum(one.cpu_seconds() for one in self.replicas)


async def send_all(
    target: EndpointTarget, questions: Sequence[Question], concurrency: int, bar: ProgressBar = QUIET
) -> list[StreamedReply]:
    """Send each question at its arrival time, or `concurrency` at a time (0: off); return the replies in order."""
    slots = asyncio.Semaphore(concurrency or len(questions) + 1)
    async with open_session(target.timeout) as session:
        calls = [
            PreparedRequest(
                str(number), question.job, request_body_of_job(question.job, target.model, prompt=question.text)
            )
            for number, question in enumerate(questions)
        ]
        start = time.perf_counter()

        async def one(call: PreparedRequest) -> StreamedReply:
            if not concurrency:
                await asyncio.sleep(max(start + call.job.at - time.perf_counter(), 0.0))
            async with slots:
                due = time.perf_counter() - start if concurrency else call.job.at
                reply = await send_streamed_request(session, target, call, due, start)
            bar.advance()
            return reply

        return list(await asyncio.gather(*(one(call) for call in calls)))


def replica_launch(setup: EngineSetup, config: FleetConfig, scratch: Path) -> Launch:
    """Return the settings of each replica."""
    flags = ("--num-blocks", str(config.pool_blocks), "--block-size", str(BLOCK_SIZE), "--threads", "1")
    return Launch(setup.model, scratch, (*flags, "--max-model-len", str(config.context), "--dtype", setup.dtype))


def _prediction_errors(decisions: Path) -> tuple[int, ...]:
    """Return the absolute prediction error in tokens for every request whose replica reported cached tokens."""
    if not decisions.is_file():
        return ()
    rows = [json.loads(line) for line in decisions.read_text(encoding="utf-8").splitlines()]
    return tuple(
        abs(row["predicted_tokens"] - row["cached_tokens"])
        for row in rows
        if row["cached_tokens"] is not None and row["prompt_tokens"] >= BLOCK_SIZE
    )
