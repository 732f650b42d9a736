"""Startup banner of a server: its address, model, KV pool, store and keys, and a curl command to try."""

import json
import shlex
from pathlib import Path

from headstart import __version__
from headstart.bundled import EXAMPLE, bundled_intent_model_folder
from headstart.config.options import ServerOptions
from headstart.core.cache.block_store import StoreStats
from headstart.core.engine_info import EngineInfo
from headstart.http.web_pages import is_loopback
from headstart.openai.sampling_defaults import describe_sampling_defaults
from headstart.server.server_state import ServedModel


def startup_banner(
    model: ServedModel, options: ServerOptions, host: str, port: int, *, store: str | None = None, uds: str = ""
) -> str:
    """Return the banner, several lines for the terminal.

    `store` is the text of `store_banner_text`, None without a store; `uds` the path of a Unix socket, empty without
    one.
    """
    info = model.info
    tokens = info.num_blocks * info.block_size
    where = f"[{host}]" if ":" in host else host
    if host in ("0.0.0.0", "::"):
        where = "127.0.0.1"
    path, body = _example(model)
    url = "http://localhost" if uds else f"http://{where}:{port}"
    curl = f"curl --unix-socket {shlex.quote(uds)}" if uds else "curl"
    has_keys = bool(options.api_key or options.tenants)
    key, first = (' -H "Authorization: Bearer $KEY"', "with KEY set to a key: ") if has_keys else ("", "")
    defaults = describe_sampling_defaults(model.bounds.defaults)
    lines = [
        f"Headstart {__version__} serves {model.name} at {url}/v1" + (f" on the socket {uds}" if uds else ""),
        f"  engine  {_numbers(info)} on {info.device}, {info.threads} threads, {info.attention_backend} attention",
        f"  KV      {_pool(info)} = {tokens:,} tokens = {tokens / info.max_model_len:.1f} x max_model_len "
        f"({info.max_model_len:,}); --kv-cache-memory changes it",
        *([f"  default {', '.join(defaults)}: where a request does not say (--generation-config)"] if defaults else []),
        *([] if store is None else [f"  store   {store}"]),
        *(
            [f"  reuse   may change tokens: {', '.join(info.exceptions)} (docs/invariants.md, 15)"]
            if info.exceptions
            else []
        ),
        *([f"  page    {url}/ shows the cache at work"] if options.page else []),
        f"  keys    {_keys(options, '127.0.0.1' if uds else host)}",
        f"  try     {first}{curl} {url}{path}{key} -H 'Content-Type: application/json' \\",
        f"            -d '{json.dumps(body)}'",
    ]
    return "\n".join(lines)


def _example(model: ServedModel) -> tuple[str, dict[str, object]]:
    """Return path and body of a request that the model can answer: its task, a chat, or the beginning of a text."""
    if Path(model.info.model) == bundled_intent_model_folder():
        roles = zip(("system", "user"), EXAMPLE, strict=True)
        messages = [{"role": role, "content": text} for role, text in roles]
        return "/v1/chat/completions", {"messages": messages, "temperature": 0, "max_tokens": 64}
    if model.tokenizer.chat_template is not None:
        question = {"role": "user", "content": "What is the capital of France?"}
        return "/v1/chat/completions", {"messages": [question], "max_tokens": 64}
    return "/v1/completions", {"prompt": "The capital of France is", "max_tokens": 16}


def store_banner_text(folder: str, store: StoreStats) -> str:
    """Return the banner's text about a store: its folder, its fill level, and the blocks that this model can use."""
    found = f"{store.num_blocks:,} blocks of this model" if store.num_blocks else "nothing of this model yet"
    limit = f" of {_size(store.max_bytes)}" if store.max_bytes else ""
    held = f"{folder}: {found}; {_size(store.num_bytes)}{limit} used"
    return f"{held}; NOT IN USE: {store.degraded}" if store.degraded else held


def _numbers(info: EngineInfo) -> str:
    return info.dtype if info.quantization == "none" else f"{info.dtype} with {info.quantization} weights"


def _pool(info: EngineInfo) -> str:
    """Return the size of the KV pool; on a CPU its memory is taken when it is first written."""
    size = _size(info.kv_bytes)
    return f"up to {size}, taken as it fills," if info.device == "cpu" else size


def _size(num_bytes: int) -> str:
    mebibytes = num_bytes / 2**20
    return f"{mebibytes:.1f} MiB" if mebibytes < 1024 else f"{mebibytes / 1024:.1f} GiB"


def _keys(options: ServerOptions, host: str) -> str:
    num_keys = len(options.api_key) + sum(len(tenant.api_keys) for tenant in options.tenants)
    if num_keys:
        num_tenants = len(options.api_key) + len(options.tenants)
        return f"{num_keys} configured, of {num_tenants} tenants that share no cached prefix but public ones"
    if is_loopback(host):
        return "none needed on this machine (--api-key adds some)"
    return "NONE: everyone who can reach this address may use it; add --api-key"
