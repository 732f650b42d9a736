"""The router verbs of `headstart bench lab ...`: routing decisions, policies, predictions, proxy cost and failover."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headstart.bench.cli import cli_run
from headstart.bench.cli.cli_run import Quick, Runs, Seed

if TYPE_CHECKING:
    from headstart.bench.progress_bar import Bar
    from headstart.bench.report import Report
    from headstart.bench.runners.engines import Setup

router_lab = typer.Typer()


@router_lab.command(short_help="Cost of a routing decision.")
def pick(
    seed: Seed = 0,
    unique_prompts: Annotated[
        int, typer.Option(min=1, help="One-off prompts, which must not grow the index; published: 1000000.")
    ] = 100_000,
    quick: Quick = False,
) -> None:
    """Time decisions on a 32k-token prompt with 16 replicas and a million blocks in the index: CPU microseconds."""

    def bench(bar: "Bar") -> "Report":
        from headstart.bench.experiments.router.decision_cost import QUICK, PickConfig, run_pick

        return run_pick(seed, QUICK if quick else PickConfig(unique=unique_prompts), bar)

    cli_run.finish(bench, None)


@router_lab.command(short_help="Routing policies on recorded traffic, in virtual time.")
def route(
    trace: Annotated[Path, typer.Option(exists=True, dir_okay=False, help="A Mooncake or LMCache agent trace.")],
    replicas: Annotated[int, typer.Option(min=1, help="Replicas behind the router.")] = 8,
    routers: Annotated[int, typer.Option(min=1, help="Independent routers, each with a share of the traffic.")] = 1,
    speed: Annotated[float, typer.Option(min=0.01, help="Times the recorded rate; of agents: calls per second.")] = 2.6,
    cache_blocks: Annotated[int, typer.Option(min=2, help="Blocks in each replica's cache.")] = 2930,
    requests: Annotated[int, typer.Option(min=0, help="Use the first N requests; 0: all.")] = 0,
) -> None:
    """Replay one trace with every policy, with learning at the decision or the response, and with an index x4."""

    def bench(bar: "Bar") -> "Report":
        from headstart.bench.experiments.router.policy_traces import RouteConfig, run_route

        config = RouteConfig(replicas, speed, cache_blocks, max_requests=requests, routers=routers)
        return run_route(trace, config, bar)

    cli_run.finish(bench, None)


@router_lab.command(short_help="Predicted against actual cached tokens, on agent traces.")
def predict(
    trace: Annotated[
        list[Path], typer.Option(exists=True, dir_okay=False, help="An LMCache agent trace; may be repeated.")
    ],
    replicas: Annotated[int, typer.Option(min=1, help="Engines behind the router.")] = 4,
    cache_blocks: Annotated[int, typer.Option(min=8, help="Blocks in each engine's pool.")] = 2048,
    speed: Annotated[float, typer.Option(min=0.01, help="Session starts relative to the recorded rate.")] = 20.0,
    requests: Annotated[int, typer.Option(min=0, help="Use the first N requests of each trace; 0: all.")] = 0,
    quick: Quick = False,
) -> None:
    """Run real engines without a model: the router's predicted cached tokens, with and without self-correction."""

    def bench(bar: "Bar") -> "Report":
        from headstart.bench.experiments.router.predict import QUICK, PredictConfig, run_predict

        config = QUICK if quick else PredictConfig(replicas, cache_blocks, speed, requests)
        return run_predict(trace, config, bar)

    cli_run.finish(bench, None)


@router_lab.command(short_help="Latency a router adds to the first byte and to each token.")
def proxy(
    peer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=ENVIRONMENT",
            help="Also measure smg, sglang-router, vllm-router or envoy (benchmarks/peers/setup.sh); may be repeated.",
        ),
    ] = None,
    streams: Annotated[int, typer.Option(min=1, help="Concurrent streams.")] = 200,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 50,
    token_ms: Annotated[float, typer.Option(min=1, help="Milliseconds between tokens.")] = 40.0,
    steps: Annotated[
        bool, typer.Option("--steps", help="All answers get their tokens at once, as from engine steps.")
    ] = False,
    replicas: Annotated[int, typer.Option(min=1, help="Fake replicas.")] = 1,
    policy: Annotated[str, typer.Option(help="Policy of our router.")] = "cost",
    seconds: Annotated[float, typer.Option(min=0.5, help="Measured seconds per side and run.")] = 15.0,
    runs: Runs = 5,
    quick: Quick = False,
) -> None:
    """Stream from fake replicas, directly and through our router and peers in turn: milliseconds added, CPU time."""

    def bench(bar: "Bar") -> "Report":
        from headstart.bench.experiments.router.proxy_cost import QUICK, ProxyConfig, run_proxy
        from headstart.bench.runners.route_process import parse_peer

        config = ProxyConfig(
            streams, tokens, token_ms, steps=steps, replicas=replicas, policy=policy, seconds=seconds, runs=runs
        )
        return run_proxy(
            replace(QUICK, policy=policy) if quick else config, [parse_peer(text) for text in peer or ()], bar
        )

    cli_run.finish(bench, None)


@router_lab.command(short_help="Replicas killed and restarted under load: requests lost.")
def failover(
    model: Annotated[
        str, typer.Option(help="Folder, hub id or shape; empty: the bundled model; none: servers without a model.")
    ] = "",
    replicas: Annotated[int, typer.Option(min=2, help="Servers behind the router.")] = 3,
    kills: Annotated[int, typer.Option(min=1, help="Number of kills; published: 20.")] = 8,
    requests: Annotated[int, typer.Option(min=1, help="During the rolling restart, at least.")] = 2000,
    seed: Seed = 0,
    quick: Quick = False,
) -> None:
    """Kill replicas (-9) under load, restart them in turn at 70 % load, without retries: requests lost, by reason."""

    def run(setup: "Setup | None", bar: "Bar") -> "Report":
        from headstart.bench.experiments.router.failover import QUICK, FailoverConfig, run_failover

        config = replace(QUICK if quick else FailoverConfig(kills=kills, requests=requests), seed=seed)
        config = replace(config, replicas=replicas)
        if setup is not None:
            config = replace(config, model=setup.model, label=setup.label)
        else:
            config = replace(config, model=None)
        return run_failover(config, bar)

    if quick or model == "none":
        cli_run.finish(lambda bar: run(None, bar), None)
    else:
        cli_run.run_on_model(run, model, "auto", 1, seed, None)


@router_lab.command(short_help="KV events: the router's index against the engine's.")
def precise(seed: Seed = 0, quick: Quick = False) -> None:
    """Relay KV events of a real engine without a model over a lossy link: equality of both indexes, event cost."""

    def bench(bar: "Bar") -> "Report":
        from headstart.bench.experiments.router.precise import QUICK, PreciseConfig, run_precise

        return run_precise(seed, QUICK if quick else PreciseConfig(), bar)

    cli_run.finish(bench, None)
