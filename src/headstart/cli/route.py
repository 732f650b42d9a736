"""`headstart route`: a router in front of replicas that run already."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import typer

from headstart.cli.cli_options import Sources, add_option_flags, print_starting_line
from headstart.config.config_file import merge_option_sources
from headstart.config.options import RouterOptions, ServerOptions
from headstart.core.errors import ConfigError

if TYPE_CHECKING:
    from headstart.gateway.http_front import RouterFront

EXAMPLES = """Examples:
  headstart route --replica http://10.0.0.7:8000 --replica http://10.0.0.8:8000 --host 0.0.0.0
  headstart route --discover file:replicas.txt --port 9000
  headstart route --replica http://10.0.0.7:8000 --replica http://10.0.0.8:8000 --envoy
  curl -sD- localhost:8000/v1/completions -H 'x-headstart-explain: 1' -d '{"prompt": "Hi"}' -o/dev/null"""
NOT_OF_A_ROUTER = (
    *("served_model_name", "tool_call_parser", "enable_auto_tool_choice", "reasoning_parser", "extra_properties"),
    *("unreadable_parts", "doctor_share", "prompt_log_size", "clamp_max_tokens", "max_num_queued_tokens"),
    *("max_n", "max_prompts", "max_logprobs", "response_store_size", "response_store_ttl"),
    *("heartbeat_timeout", "record", "stats_interval"),
    *("replicas", "on", "max_replicas", "target_ongoing_requests", "upscale_delay", "downscale_delay"),
)
"""Options that apply to replicas, not to a router."""


@add_option_flags(RouterOptions, ServerOptions, skip=NOT_OF_A_ROUTER)
def route(*, sources: Sources) -> None:
    """Route each request to the replica with the earliest expected first token.

    Replicas are servers with the OpenAI API: Headstart, vLLM, SGLang. Clients see one server.
    """
    _name_unread(sources[-1])
    router, server = merge_option_sources(RouterOptions, *sources), merge_option_sources(ServerOptions, *sources)
    print_starting_line()
    from headstart.gateway.run_gateway import run_router as run_router
    from headstart.model.kernels.block_hashes import load_compiled_hash_chain
    from headstart.model.kernels.compiled_pool import compiled_pool_factory

    fronts = envoy_fronts_of_options(router, server)
    raise typer.Exit(
        run_router(router, server, fronts=fronts, chain=load_compiled_hash_chain(), pools=compiled_pool_factory())
    )


def _name_unread(file: Mapping[str, Any]) -> None:
    """Print a warning that names the keys of headstart.toml that a router does not read; a server may share the file.

    Raises ConfigError for [[prefix]]: what is in it would be computed nowhere.
    """
    if "prefixes" in file:
        raise ConfigError(
            "[[prefix]] has no effect in the file of a router: write it into that of each replica, or send it to "
            "POST /v1/prefixes of the router, which reaches all of them"
        )
    read = {field.name for options in (RouterOptions, ServerOptions) for field in fields(options)}
    if unread := sorted(file.keys() - (read - {*NOT_OF_A_ROUTER})):
        print(f"headstart: warning: of no effect on a router: {', '.join(unread)}", file=sys.stderr)


def envoy_fronts_of_options(router: RouterOptions, server: ServerOptions) -> "Sequence[RouterFront]":
    """Return the fronts that the options about Envoy ask for. Raises ConfigError."""
    if router.envoy == "none" and router.ext_proc is None:
        return ()
    if router.flow_control or router.queue_timeout:
        raise ConfigError(
            "flow_control and queue_timeout need the router's own HTTP front: leave envoy and ext_proc out"
        )
    try:
        from headstart.gateway.picker.picker_fronts import make_envoy_fronts
    except ImportError as error:
        raise ConfigError(f"Envoy's endpoint picker needs {error.name}: pip install 'headstart[envoy]'") from None
    return make_envoy_fronts(router, server)
