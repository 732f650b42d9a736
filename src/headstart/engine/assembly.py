"""Construction of the engine from its options: model, KV pool, scheduler, runner, store, event publisher.

Imports torch: call `configure_num_threads` before importing this module.
"""

import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from headstart.allocator import trim_heap
from headstart.bundled import BUNDLED_NAME
from headstart.config.options import EngineOptions
from headstart.core.cache.block_store import BlockStore
from headstart.core.engine import Engine
from headstart.core.engine_info import EngineInfo
from headstart.core.errors import ConfigError
from headstart.core.executor import Executor
from headstart.core.sched.scheduler import Scheduler
from headstart.core.sched.scheduler_config import SchedulerConfig
from headstart.core.speculation.speculation_config import parse_speculative_config
from headstart.core.warm_up import measure_draft_cost, measure_step_times, memory_profile_batches
from headstart.engine.engine_checks import (
    check_engine_options,
    find_or_download_model,
    parse_store_size,
    step_limits_of,
)
from headstart.engine.kv_event_publisher import KVEventPublisher, parse_kv_events_config
from headstart.gguf.gguf_reader import has_gguf_suffix
from headstart.measurement.progress_bar import progress_bar
from headstart.model.grammar.grammar_compiler import CachingGrammarCompiler
from headstart.model.kernels.block_hashes import load_compiled_hash_chain
from headstart.model.kernels.compiled_blocks import compiled_block_loops
from headstart.model.kernels.library import find_kernels, kernel_library_in_use
from headstart.model.model_runner import ModelRunner
from headstart.model.setup.sizes import MemoryInfo, format_bytes, parse_bytes
from headstart.model.setup.sizing import (
    KVPoolPlan,
    apply_threads,
    check_weights_fit,
    device_memory,
    gpu_budget,
    loaded_weight_bytes,
    measure_gpu_peak_increase,
    measure_torch_gpu_bytes,
    oom_as_config_error,
    plan_kv_pool,
)
from headstart.model.setup.threads import configure_num_threads
from headstart.model.weights.model_loader import LoadedModel, load_model, resolve_device, uses_cuda_executor
from headstart.openai.sampling_defaults import read_sampling_defaults
from headstart.openai.structured.grammar_text import grammar_parser_limits
from headstart.store.files import create_store_folder
from headstart.store.format import StoredBlockFormat
from headstart.store.tiers.chained_store import open_store
from headstart.store.tiers.tier import StoreTierLocations, parse_tier_places, read_shared_secrets

Profile = Callable[[LoadedModel, int], int]
"""Returns the bytes on a GPU that a step of so many tokens needs beside weights and pool."""
PROFILE_BLOCK_SIZE = 16
CUDA_RUNNER = "headstart.model.cuda.cuda_runner"  # imported where there is a GPU: it needs Triton


def build_engine(
    options: EngineOptions,
    folder: Path | None = None,
    *,
    charge_cached: bool = False,
    profile: Profile | None = None,
) -> tuple[Engine, EngineInfo]:
    """Load the model (progress on stderr), size the KV pool, and build the scheduler and the runner.

    `folder` is the result of `checked_model_folder(options)`; None: options are checked and the folder is found here.
    `profile` is called on a GPU only; None: steps of a ModelRunner are run. Raises ConfigError with a one-line message
    for options that cannot work, and for a GPU without enough memory.
    """
    if folder is None:
        check_engine_options(options)
    threads = configure_num_threads(options.threads)
    apply_threads(threads)
    store_places = _store_places(options)  # before loading the model, so that an unusable folder is reported at once
    publisher = _event_publisher(options)
    folder = folder or find_or_download_model(options)
    defaults = read_sampling_defaults(folder, options.generation_config)
    device = str(resolve_device(options.device))
    with oom_as_config_error(f"starting on {device}", "end other processes (nvidia-smi lists them)"):
        found = device_memory(device)
    loaded, plan, max_model_len = _load(options, folder, device, found, profile)
    grammars = CachingGrammarCompiler(folder, loaded.vocab_size, loaded.eos_token_ids, grammar_parser_limits())
    pool = f"allocating the KV pool of {format_bytes(plan.kv_bytes)}"
    with oom_as_config_error(pool, "end other processes, or lower --gpu-memory-utilization", found):
        runner = _make_runner(options, loaded, plan.num_blocks, grammars)
    on_cpu = loaded.device.type == "cpu"
    store = _open_store(
        options, store_places, StoredBlockFormat(loaded.fingerprint, options.block_size, runner.block_bytes)
    )
    speculation = parse_speculative_config(options.speculative_config)
    state_pages = -(-loaded.state_bytes // (loaded.kv_bytes_per_token * options.block_size))
    config = SchedulerConfig(
        num_blocks=plan.num_blocks,
        block_size=options.block_size,
        limits=step_limits_of(options, max_model_len, on_cpu=on_cpu),
        model=loaded.fingerprint,
        enable_prefix_caching=options.enable_prefix_caching,
        policy=options.scheduling_policy,
        lpm_k=options.lpm_k,
        eviction_policy=options.eviction_policy,
        tenant_floor=options.tenant_cache_floor,
        max_pinned_share=options.max_pinned_share,
        speculation=speculation,
        state_pages=state_pages,
        charge_cached=charge_cached,
        max_draft_tokens=speculation.num_speculative_tokens if speculation is not None and state_pages else 0,
    )
    scheduler = Scheduler(config, store=store, chain=load_compiled_hash_chain(), ops=compiled_block_loops())
    if on_cpu:
        measure_step_times(runner, scheduler.step_times, max_tokens=max_model_len)
        if scheduler.speculation is not None:
            measure_draft_cost(runner, scheduler.speculation.cost, max_tokens=max_model_len, state_pages=state_pages)
    trim_heap()  # gives back what loading has freed: a third of a GiB for a model of 0.6B
    info = EngineInfo(
        model=str(folder),
        served_name=_served_name(options.model),
        vocab_size=loaded.vocab_size,
        max_model_len=max_model_len,
        block_size=options.block_size,
        num_blocks=plan.num_blocks - 1,
        kv_bytes=plan.kv_bytes,
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=str(loaded.device),
        threads=threads,
        attention_backend=loaded.attention_backend,
        quantization=options.quantization,
        eos_token_ids=loaded.eos_token_ids,
        scheduling_policy=options.scheduling_policy,
        sampling_defaults=defaults,
        exceptions=loaded.exceptions,
        max_num_batched_tokens=options.max_num_batched_tokens,
        checkpoint_tokens=state_pages * options.block_size,
    )
    event_sink = None if publisher is None else publisher.publish
    return Engine(scheduler, runner, event_sink=event_sink, store=store, grammars=grammars), info


def _load(
    options: EngineOptions, folder: Path, device: str, found: MemoryInfo, profile: Profile | None
) -> tuple[LoadedModel, KVPoolPlan, int]:
    """Return the model, the KV pool plan and max_model_len. Raises ConfigError before loading what cannot fit."""
    on_gpu = device.startswith("cuda")
    available = _available(options, found, on_gpu=on_gpu)
    if device == "cpu" and kernel_library_in_use() is None:
        print(
            f"Headstart has no CPU kernels here: {find_kernels().note}; torch is slower (headstart doctor)",
            file=sys.stderr,
        )
    packs = (
        options.dtype != "float32" and device == "cpu" and kernel_library_in_use() is not None
    )  # weights of less than 8 bits
    unpacks = options.quantization == "int4" or (
        options.dtype == "float32" and device == "cpu" and kernel_library_in_use() is not None
    )
    quantization = "none" if unpacks and not packs else options.quantization
    blocks = packs and quantization == "none"
    expected = loaded_weight_bytes(folder, dtype=options.dtype, quantization=quantization, blocks=blocks)
    check_weights_fit(expected, available, on_gpu=on_gpu)
    held = measure_torch_gpu_bytes(device) if on_gpu else 0
    smaller = "end other processes, or use a smaller model or a lower --max-num-batched-tokens"
    with oom_as_config_error(f"loading {format_bytes(expected)} of weights", smaller, found):
        loaded = load_model(
            folder,
            dtype=options.dtype,
            device=device,
            attention_backend=options.attention_backend,
            quantization=options.quantization,
            linear_dispatch=options.linear_dispatch,
            activation_bits=int(options.activation_bits),
            batch_invariant=options.batch_invariant,
        )
        weight_bytes = max(loaded.weight_bytes, measure_torch_gpu_bytes(device) - held if on_gpu else 0)
        left = available - weight_bytes
        profile = profile or partial(_run_profile, max_seqs=options.max_num_seqs, left=left)
        profile_bytes = profile(loaded, options.max_num_batched_tokens) if on_gpu else None
    max_model_len = loaded.max_model_len if options.max_model_len is None else options.max_model_len
    if max_model_len > loaded.max_model_len:
        raise ConfigError(f"max_model_len is {max_model_len}, but the model supports {loaded.max_model_len} positions")
    num_states = _num_states(options)
    if loaded.state_bytes:
        print(
            f"{loaded.architecture} has recurrent layers: {num_states} states of {format_bytes(loaded.state_bytes)} "
            f"are held for --max-num-seqs {options.max_num_seqs} and drafts, one for each place where a hit can end",
            file=sys.stderr,
        )
    plan = plan_kv_pool(
        kv_bytes_per_token=loaded.kv_bytes_per_token,
        block_size=options.block_size,
        weight_bytes=weight_bytes + loaded.state_bytes * num_states,
        max_model_len=max_model_len,
        available_bytes=available,
        kv_cache_memory=options.kv_cache_memory,
        num_blocks_override=options.num_gpu_blocks_override,
        max_num_seqs=options.max_num_seqs,
        gpu_profile_bytes=profile_bytes,
    )
    return loaded, plan, max_model_len


def _num_states(options: EngineOptions) -> int:
    """Return the recurrent states that are held at once: one per sequence, and one for each draft token of a step."""
    config = parse_speculative_config(options.speculative_config)
    return options.max_num_seqs + (config.num_speculative_tokens if config is not None else 0)


def _run_profile(loaded: LoadedModel, max_batched_tokens: int, *, max_seqs: int, left: int) -> int:
    """Return the bytes that steps of the runner take of those `left` by the weights. Runs two, without the pool.

    Included are the graphs of a CudaRunner, or else a copy of one layer of the pool, since decodes of the reference
    attention gather their keys and values.
    """
    batches, num_blocks = memory_profile_batches(max_batched_tokens, max_seqs, loaded.max_model_len, PROFILE_BLOCK_SIZE)
    if uses_cuda_executor(loaded.model, loaded.device, loaded.attention_backend):
        cuda: Any = import_module(CUDA_RUNNER)

        def run() -> None:
            runner = cuda.CudaRunner(loaded, num_blocks=num_blocks, block_size=PROFILE_BLOCK_SIZE, max_rows=max_seqs)
            for batch in batches:
                runner.execute(batch)

        return measure_gpu_peak_increase(run, str(loaded.device)) + cuda.GRAPHS_BYTES
    runner = ModelRunner(loaded, num_blocks=num_blocks, block_size=PROFILE_BLOCK_SIZE)
    peak = measure_gpu_peak_increase(lambda: [runner.execute(batch) for batch in batches], str(loaded.device))
    if loaded.attention_backend != "reference":
        return peak
    return peak + max(left - peak, 0) // (loaded.kv_shape.num_layers + 1)


def _make_runner(
    options: EngineOptions, loaded: LoadedModel, num_blocks: int, grammars: CachingGrammarCompiler
) -> Executor:
    """Return the executor of a loaded model; that of a GPU captures its graphs, with a progress bar."""
    given: dict[str, Any] = {
        "num_blocks": num_blocks, "block_size": options.block_size, "seed": options.seed, "grammars": grammars,
    }  # fmt: skip
    if not uses_cuda_executor(loaded.model, loaded.device, loaded.attention_backend):
        return ModelRunner(loaded, **given)
    runner = import_module(CUDA_RUNNER).CudaRunner(loaded, max_rows=options.max_num_seqs, **given)
    keys = runner.graphs.keys()
    with progress_bar() as bar:
        bar.start_stage(f"Capturing CUDA graphs of {loaded.folder.name}", len(keys))
        for key in keys:
            runner.warm_up([key])
            bar.advance()
    return runner


def _available(options: EngineOptions, found: MemoryInfo, *, on_gpu: bool) -> int:
    """Return the bytes for the weights and all that is beside them. Raises ConfigError for a GPU that others use."""
    limit = None if options.memory_limit is None else parse_bytes(options.memory_limit)
    if not on_gpu:
        return found.available if limit is None else min(found.available, limit)
    is_sized = options.kv_cache_memory is not None or options.num_gpu_blocks_override is not None
    return gpu_budget(found, options.gpu_memory_utilization, limit=limit, is_sized=is_sized)


def _store_places(options: EngineOptions) -> StoreTierLocations:
    """Return the places of --kv-store, a folder ready for use, or none. Raises ConfigError."""
    if options.kv_store is None:
        return StoreTierLocations(None, None)
    found = parse_tier_places(options.kv_store)
    if found.folder is not None:
        create_store_folder(found.folder)
    return found


def _open_store(options: EngineOptions, found: StoreTierLocations, shape: StoredBlockFormat) -> BlockStore | None:
    """Open the tiers of --kv-store. Raises ConfigError."""
    secrets = () if found.url is None else read_shared_secrets(options.kv_store_secret)
    given: dict[str, Any] = {
        "password": options.kv_store_password, "secrets": secrets, "ttl": options.kv_store_ttl,
    }  # fmt: skip
    return open_store(found, shape, parse_store_size(options), **given)


def _event_publisher(options: EngineOptions) -> KVEventPublisher | None:
    config = parse_kv_events_config(options.kv_events_config)
    if config is None:
        return None
    return KVEventPublisher(config, medium="CPU" if resolve_device(options.device).type == "cpu" else "GPU")


def _served_name(model: str) -> str:
    """Return the name to serve a model under: a hub id unchanged, that of a folder or GGUF file without its path."""
    if not model:
        return BUNDLED_NAME
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve().name
    return path.stem if has_gguf_suffix(path) and path.is_file() else model
