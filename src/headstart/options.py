"""Every option of Headstart as plain values: one field = one `--flag` = one `headstart.toml` key = one `HEADSTART_*`.

Floor 0: standard library only. The help text of a flag lives here, in the field's metadata, so that CLI, docs and file
cannot drift apart. Reading argv, environment and files is cli.py's business alone.
"""

from dataclasses import dataclass, field
from typing import Any


def _option(default: Any, help_text: str, **extra: Any) -> Any:  # the type dataclasses.field itself has
    return field(default=default, metadata={"help": help_text, **extra})


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What the engine process needs to know. Names follow vLLM's flags where the meaning is the same."""

    model: str = _option("", "Folder, or hub id such as Qwen/Qwen3-0.6B. Empty: the bundled intent model.")
    revision: str | None = _option(None, "Branch, tag or commit on the hub.")
    hf_token: str | None = _option(None, "Hub access token (else HF_TOKEN).", secret=True)
    offline: bool = _option(False, "Never ask the hub; use what is already downloaded.")
    download_dir: str | None = _option(None, "Where downloads go (default: the hub's own cache).")
    dtype: str = _option("auto", "auto | bfloat16 | float32. auto: the checkpoint's, float16 becoming bfloat16.")
    device: str = _option("auto", "auto | cpu | cuda[:N].")
    threads: int = _option(0, "Compute threads; 0: as many as the cgroup grants cores.")
    attention_backend: str = _option("auto", "auto | reference.")
    block_size: int = _option(16, "Tokens per KV block; a multiple of 16.")
    num_gpu_blocks_override: int | None = _option(None, "KV blocks, whatever the memory.", alias="num-blocks")
    kv_cache_memory: str | None = _option(None, "KV pool size such as 6GiB (default: 40 % of what is left).")
    max_model_len: int | None = _option(None, "Prompt + output tokens of a request (default: the model's).")
    max_num_seqs: int = _option(256, "Sequences running at once.")
    max_num_batched_tokens: int = _option(2048, "Token budget of a step; cached tokens cost nothing.")
    long_prefill_token_threshold: int = _option(0, "Cap on one prompt's tokens per step while others wait; 0: none.")
    enable_prefix_caching: bool = _option(True, "Take over KV that an earlier request computed.")
    scheduling_policy: str = _option("fcfs", "fcfs | priority.")
    seed: int = _option(0, "Seed for sampling of requests that bring none.")


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What the HTTP front needs to know."""

    host: str = _option("127.0.0.1", "Address to listen on.")
    port: int = _option(8000, "Port to listen on; 0: any free one (printed).")
    served_model_name: str | None = _option(None, "Name in /v1/models (default: the model's id or folder name).")
    api_key: tuple[str, ...] = _option((), "Key clients must send; repeat for several.", secret=True)
    admin_api_key: tuple[str, ...] = _option((), "Key for /reset_prefix_cache and other admin calls.", secret=True)
    max_num_queued_reqs: int = _option(1024, "Requests that may wait; more get 429.")
    max_num_queued_tokens: int = _option(2_000_000, "Prompt tokens that may wait; more get 429.")
    max_body_bytes: int = _option(4 * 1024 * 1024, "Largest request body.")
    max_n: int = _option(16, "Largest n of a request.")
    max_prompts: int = _option(64, "Most prompts in one /v1/completions.")
    max_logprobs: int = _option(20, "Most alternatives per token.")
    drain_timeout: float = _option(120.0, "Seconds SIGTERM waits for admitted requests.")
    heartbeat_timeout: float = _option(60.0, "Seconds without a step before /livez says 503.")
    stats_interval: float = _option(10.0, "Seconds between statistics lines; 0: none.")
    access_log: bool = _option(True, "One JSON line per request on stderr.")
