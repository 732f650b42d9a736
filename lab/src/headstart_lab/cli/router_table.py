"""The experiments on routers: `headstart bench fleet`, and a row per verb of `bench lab` in the order of --help."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headstart.bench.cli import cli_run
from headstart.bench.cli.bench_flags import BenchTarget, Dtype, Quick, VerbFlag
from headstart_lab.cli.experiment_flags import FIVE_RUNS, PLOT, QUICK, SEED, TRACE_UNITS, Model, Seed, flag
from headstart_lab.cli.experiment_verb import Experiment, Verb

if TYPE_CHECKING:
    from headstart.measurement.progress_bar import ProgressBar
    from headstart.measurement.report import BenchmarkReport
    from headstart.measurement.runner import EngineSetup

ROUTE_TRACE = typer.Option(exists=True, help="A trace with block ids or texts; a folder of sessions.")
AGENT_TRACES = typer.Option("--trace", exists=True, dir_okay=False, help="An LMCache agent trace; may be repeated.")


def failover(
    model: Annotated[
        str, typer.Option(help="Folder, hub id or shape; empty: the bundled model; none: servers without a model.")
    ] = "",
    replicas: Annotated[int, typer.Option(min=2, help="Servers behind the router.")] = 3,
    kills: Annotated[int, typer.Option(min=1, help="Number of kills; published: 20.")] = 8,
    requests: Annotated[int, typer.Option(min=1, help="During the rolling restart, at least.")] = 2000,
    envoy: Annotated[str, typer.Option(help="Serve clients by this Envoy: auto, or the path of its binary.")] = "",
    seed: Seed = 0,
    quick: Quick = False,
) -> None:
    """Kill replicas (-9) under load, restart them in turn at 70 % load, without retries: requests lost, by reason."""

    def run(setup: "EngineSetup | None", bar: "ProgressBar") -> "BenchmarkReport":
        from headstart_lab.router.failover import QUICK, FailoverConfig, run_failover

        config = QUICK if quick else FailoverConfig(kills=kills, requests=requests)
        config = replace(config, replicas=replicas, seed=seed, model=None, envoy=envoy)
        return run_failover(config if setup is None else replace(config, model=setup.model, label=setup.label), bar)

    if quick or model == "none":
        cli_run.run_and_exit(lambda bar: run(None, bar), None)
    else:
        cli_run.run_model_bench_and_exit(run, BenchTarget(model, threads=1, asked_seed=seed))


FLEET = Experiment(
    name="fleet",
    run="router.fleet_report:run_fleet",
    config="FleetConfig",
    flags={
        "model": VerbFlag(Model, "llama-3m"),
        "replicas": flag(4, "Servers of one thread each.", min=1),
        "policies": flag(
            None, "Policy of our router; may be repeated.", "--policy", kind=list[str] | None, show_default="all"
        ),
        "peer": flag(
            None,
            "Another router: sglang-router, smg or vllm-router, and its installation folder.",
            kind=list[str] | None,
            metavar="NAME=ENVIRONMENT",
        ),
        "groups": flag(12, "Groups; each shares a system prompt.", min=1),
        "prompts": flag(8, "Questions per group; published: 10.", min=1),
        "output": flag(16, "Tokens to generate (ignore_eos).", "--output-tokens", min=1),
        "high_rate": flag(0.0, "Requests/s at high hit; 0: --load.", min=0),
        "low_rate": flag(0.0, "Requests/s at low hit; 0: --load.", min=0),
        "decode_output": flag(
            0, "Median output of decode-heavy chats, a third workload; 0: off.", "--decode-output-tokens", min=0
        ),
        "workloads": flag(
            None,
            "Measure only high, low or decode; may be repeated.",
            "--workload",
            kind=list[str] | None,
            show_default="all",
        ),
        "decode_rate": flag(0.0, "Requests/s of decode-heavy chats; 0: --load.", min=0),
        "load": flag(0.7, "Share of the capacity under round robin.", min=0.01, max=2),
        "runs": flag(1, "Repetitions, in turn; published: 3.", min=1),
        "dtype": VerbFlag(Dtype, "auto"),
        **SEED,
        **QUICK,
        **PLOT,
    },
    keeps=(
        *("replicas", "policies", "workloads", "output"),
        *("high_rate", "low_rate", "decode_output", "decode_rate", "load"),
    ),
    caps=("groups", "prompts"),
    summary="Real replicas behind our router and others.",
    help="Serve generated-shared-prefix (gateway-api-inference-extension): 3000 + 128 tokens and the reverse.",
)
ROUTER = (
    Experiment(
        name="pick",
        run="router.decision_cost:run_pick",
        config="PickConfig",
        flags={
            **SEED,
            "unique": flag(
                100_000,
                "One-off prompts, which must not grow the index; published: 1000000.",
                "--unique-prompts",
                min=1,
            ),
            **QUICK,
        },
        summary="Cost of a routing decision.",
        help="Time decisions on a 32k-token prompt with 16 replicas and a million blocks in the index: "
        "CPU microseconds.",
    ),
    Experiment(
        name="route",
        run="router.policy_traces:run_route",
        config="RouteConfig",
        flags={
            "trace": VerbFlag(Annotated[Path, ROUTE_TRACE]),
            "replicas": flag(8, "Replicas behind the router.", min=1),
            "routers": flag(1, "Independent routers, each with a share of the traffic.", min=1),
            "speed": flag(2.6, "Times the recorded rate; of agents: calls per second.", min=0.01),
            "cache": flag(2930, "Blocks in each replica's cache.", "--cache-blocks", min=2),
            "max_requests": flag(0, "Use the first N requests; 0: all.", "--requests", min=0),
            **TRACE_UNITS,
        },
        summary="Routing policies on recorded traffic, in virtual time.",
        help="Replay one trace with every policy, with learning at the decision or the response, and with an index x4.",
    ),
    Experiment(
        name="predict",
        run="router.predict:run_predict",
        config="PredictConfig",
        flags={
            "traces": VerbFlag(Annotated[list[Path], AGENT_TRACES]),
            "replicas": flag(4, "Engines behind the router.", min=1),
            "cache": flag(2048, "Blocks in each engine's pool.", "--cache-blocks", min=8),
            "speed": flag(20.0, "Session starts relative to the recorded rate.", min=0.01),
            "max_requests": flag(0, "Use the first N requests of each trace; 0: all.", "--requests", min=0),
            "trace_time_unit": TRACE_UNITS["trace_time_unit"],
            **QUICK,
        },
        summary="Predicted against actual cached tokens, on agent traces.",
        help="Run real engines without a model: the router's predicted cached tokens, with and without "
        "self-correction.",
    ),
    Experiment(
        name="proxy",
        run="router.proxy_cost:run_beside_peers",
        config="ProxyConfig",
        flags={
            "peer": flag(
                None,
                "Also measure smg, sglang-router, vllm-router, envoy or envoy-null:KIND (benchmarks/peers/setup.sh, "
                "benchmarks/peers/routers); may be repeated.",
                kind=list[str] | None,
                metavar="NAME=ENVIRONMENT",
            ),
            "streams": flag(200, "Concurrent streams.", min=1),
            "tokens": flag(50, "Tokens of each answer.", min=1),
            "token_ms": flag(40.0, "Milliseconds between tokens.", min=1),
            "steps": flag(False, "All answers get their tokens at once, as from engine steps.", "--steps"),
            "replicas": flag(1, "Fake replicas.", min=1),
            "prompt_bytes": flag(2048, "Bytes of each prompt, half of them one of 16 shared prefixes.", min=64),
            "policy": flag("cost", "Policy of our router."),
            "envoy": flag("", "Also measure our router with this Envoy: auto, or the path of its binary."),
            "seconds": flag(15.0, "Measured seconds per side and run.", min=0.5),
            **FIVE_RUNS,
            **QUICK,
        },
        keeps=("policy", "envoy"),
        summary="Latency a router adds to the first byte and to each token.",
        help="Stream from fake replicas, directly and through our router and peers in turn: milliseconds added, "
        "CPU time.",
    ),
    Verb("failover", failover, "Replicas killed and restarted under load: requests lost."),
    Experiment(
        name="precise",
        run="router.precise:run_precise",
        config="PreciseConfig",
        flags=SEED | QUICK,
        summary="KV events: the router's index against the engine's.",
        help="Relay KV events of a real engine without a model over a lossy link: equality of both indexes, "
        "event cost.",
    ),
)
