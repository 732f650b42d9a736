"""Experiment: precise mode. Checks that the router's KV event index equals the engine's own, also with lost events.

A real scheduler over a pool too small for its load (NullExecutor), the real publisher, real sockets, a relay that
drops batches, a consumer. Then the cost of applying events: batches as they were published, in order, one thread.
"""

import asyncio
import gc
import tempfile
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from time import thread_time
from typing import Any

from headstart.core.cache.events import BlockRemoved, BlockStored
from headstart.gateway.kv_events.kv_event_decoding import KVEventDecoder
from headstart.measurement.progress_bar import QUIET, ProgressBar
from headstart.measurement.report import BenchmarkReport, ReportTable
from headstart.router.index.event_sequencer import EventSequencer
from headstart.workload.request_record import percentile
from headstart_lab.router.precise_rig import Difference, Rig, Sizes

END_SECONDS = 600.0  # of one case; it takes seconds
LARGE = Sizes(num_blocks=4096, block_size=16, groups=40, prefix=1024, suffix=512)


@dataclass(frozen=True, slots=True)
class PreciseConfig:
    """`rounds` of requests per case, the share of batches dropped, and the repetitions of the cost measurement."""

    sizes: Sizes = LARGE
    rounds: int = 150
    loss: float = 0.2
    passes: int = 5


QUICK = PreciseConfig(Sizes(), rounds=20, passes=1)


@dataclass(frozen=True, slots=True)
class Case:
    """Faults of the event stream. The index must be equal at the end; without replay, after the next cache reset."""

    name: str
    loss: bool = True
    replay: bool = True
    restarts: bool = False
    late: bool = False


CASES = (
    Case("none_lost", loss=False),
    Case("lost"),
    Case("restarted", restarts=True),
    Case("late", late=True),
    Case("lost_no_replay", replay=False),
)
_COUNTS = ("batches", "heard", "replays", "gaps", "lost", "restarts", "voids", "unknown_parents")


def run_precise(seed: int, config: PreciseConfig = PreciseConfig(), bar: ProgressBar = QUIET) -> BenchmarkReport:
    """Measure every case in turn, and the cost of an event."""
    values: dict[str, Any] = {}
    problems: list[str] = []
    rows: list[tuple[Any, ...]] = []
    bar.start_stage("losing events", len(CASES))
    for case in CASES:
        found, counts, evictions, relay_lost = _run(lambda case=case: _case(case, config, seed))
        values |= {f"{case.name}_{key}": value for key, value in found._asdict().items()}
        values |= {f"{case.name}_{key}": counts[key] for key in _COUNTS}
        values |= {f"{case.name}_evictions": evictions, f"{case.name}_lost_on_the_way": relay_lost}
        rows.append((case.name, *found, evictions, relay_lost, counts["replays"], counts["restarts"], counts["voids"]))
        if found.wrong or (found.missing and case.replay):
            problems.append(f"{case.name}: {found.missing} blocks are missing, {found.wrong} are not cached")
        if case.loss and not relay_lost:
            problems.append(f"{case.name}: no batch was lost in the relay")
        if not evictions:
            problems.append(f"{case.name}: nothing was evicted")
        bar.advance()
    bar.start_stage("applying events", config.passes)
    costs, events, blocks = _cost(config, seed, bar)
    values |= {"events": events, "blocks": blocks, "event_us": percentile(costs, 50) / events * 1e6}
    values |= {"block_us": percentile(costs, 50) / blocks * 1e6}
    columns = ("case", "engine", "router", "missing", "wrong", "evictions", "lost", "replays", "restarts", "voids")
    cost_row = (events, blocks, values["event_us"], values["block_us"])
    return BenchmarkReport(
        "lab precise",
        values,
        seed=seed,
        runs=config.passes,
        threads=1,
        spread={"block_us": [min(costs) / blocks * 1e6, max(costs) / blocks * 1e6]},
        setup={
            "blocks_in_pool": config.sizes.num_blocks,
            "block_size": config.sizes.block_size,
            "requests": config.rounds * config.sizes.requests,
            "loss": config.loss,
        },
        sheets=[
            ReportTable("blocks in the engine's index and in the router's", columns, tuple(rows)),
            ReportTable(
                "applying events, microseconds of CPU", ("events", "blocks", "per event", "per block"), (cost_row,)
            ),
        ],
        problems=problems,
    )


_Found = tuple[Difference, dict[str, int], int, int]


def _run(make: Callable[[], Coroutine[Any, Any, _Found]]) -> _Found:
    return asyncio.run(asyncio.wait_for(make(), END_SECONDS))


async def _case(case: Case, config: PreciseConfig, seed: int) -> _Found:
    """Serve the load with event loss, wait until the consumer has caught up, and compare the indexes."""
    with tempfile.TemporaryDirectory() as folder:
        rig = Rig(folder, config.sizes, seed, replay=case.replay)
        assert rig.relay is not None
        listening = [asyncio.create_task(rig.consumer.run())]
        try:
            await rig.warm_up()
            rig.relay.loss = config.loss if case.loss else 0.0
            await rig.serve(config.rounds // 2)
            if case.restarts:
                await rig.caught_up()  # else a late batch of the old publisher would count as another restart
                rig.restart()
            await rig.serve(config.rounds - config.rounds // 2)
            consumer = rig.consumer
            if case.late:
                consumer = rig.listener()
                listening.append(asyncio.create_task(consumer.run()))
            evictions = rig.engine.scheduler.pool.num_capacity_evictions
            if case.replay:
                await rig.caught_up(consumer)
            else:
                rig.relay.loss = 0.0
                await rig.until_heard()
            return rig.difference(consumer), consumer.counts, evictions, rig.relay.num_lost
        finally:
            for task in listening:
                task.cancel()
            await asyncio.gather(*listening, return_exceptions=True)
            rig.close()


def _cost(config: PreciseConfig, seed: int, bar: ProgressBar) -> tuple[list[float], int, int]:
    """Return (CPU seconds per pass to apply all batches of one run, number of events, number of blocks in them)."""
    with tempfile.TemporaryDirectory() as folder:
        rig = Rig(folder, config.sizes, seed, relayed=False)
        payloads = rig.payloads(config.rounds)
        rig.close()
        seconds: list[float] = []
        for _ in range(config.passes):
            feed, decoder, index = EventSequencer(), KVEventDecoder("headstart"), rig.listener().index
            gc.collect()
            start = thread_time()
            for number, payload in enumerate(payloads):
                for batch in feed.offer(number, payload).batches:
                    index.apply(decoder.decode(batch))
            seconds.append(thread_time() - start)
            bar.advance()
        decoder = KVEventDecoder("headstart")
        events = [event for payload in payloads for event in decoder.decode(payload)]
    blocks = sum(len(event.block_hashes) for event in events if isinstance(event, BlockStored | BlockRemoved))
    return seconds, decoder.counts["events"], blocks
