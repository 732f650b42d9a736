"""Options become an engine; what cannot work is refused in one line, before anything is loaded where possible."""

import time
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headstart.config.options import EngineOptions
from headstart.core import warm_up
from headstart.core.batch import Batch, StepResult
from headstart.core.errors import ConfigError
from headstart.core.request import Request, SamplingParams
from headstart.engine import assembly
from headstart.engine.assembly import build_engine, check_engine_options, find_or_download_model
from headstart.model.setup.sizing import device_memory
from headstart.model.weights.init_model import write_random_model

MIB = 2**20


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model("tiny", tmp_path_factory.mktemp("models") / "my-tiny", progress=False)


def test_an_engine_is_built_from_options_and_generates(tiny: Path) -> None:
    engine, info = build_engine(EngineOptions(model=str(tiny), num_gpu_blocks_override=40, dtype="float32"))
    assert (info.served_name, info.num_blocks, info.block_size, info.dtype) == ("my-tiny", 39, 16, "float32")
    assert info.kv_bytes > 0 and info.model == str(tiny)
    engine.add_request(Request("a", array("i", range(20)), SamplingParams(temperature=0.0, max_tokens=3)))
    tokens: list[int] = []
    while engine.has_work:
        tokens += [token for output in engine.step() for token in output.token_ids]
    assert len(tokens) == 3 and all(0 <= token < info.vocab_size for token in tokens)


def test_options_reach_the_scheduler(tiny: Path) -> None:
    options = EngineOptions(
        model=str(tiny),
        num_gpu_blocks_override=40,
        block_size=32,
        max_model_len=64,
        max_num_seqs=3,
        max_num_batched_tokens=77,
        long_prefill_token_threshold=5,
        enable_prefix_caching=False,
    )
    engine, info = build_engine(options, charge_cached=True)
    assert engine.scheduler._charges_cached
    limits = engine.scheduler.limits
    assert (limits.max_model_len, limits.max_seqs, limits.max_batched_tokens) == (64, 3, 77)
    assert limits.long_prefill_threshold == 5 and info.block_size == engine.executor.block_size == 32
    assert not engine.scheduler.cache.enabled


@pytest.mark.parametrize(("charge", "ceil"), [("exact", False), ("ceil", True)])
def test_page_aligned_prefill_aligns_to_the_block_size(tiny: Path, charge: str, ceil: bool) -> None:
    options = EngineOptions(model=str(tiny), num_gpu_blocks_override=8, max_model_len=64, block_size=32)
    engine, _ = build_engine(options)
    assert (engine.scheduler.limits.align, engine.scheduler.limits.charge_ceil) == (1, False)
    engine, _ = build_engine(replace(options, page_aligned_scheduling=True, page_charge=charge))
    assert (engine.scheduler.limits.align, engine.scheduler.limits.charge_ceil) == (32, ceil)


def test_without_a_name_the_bundled_model_is_meant() -> None:
    folder = find_or_download_model(EngineOptions())
    assert (folder / "config.json").is_file()


def test_different_dtypes_never_share_block_names(tiny: Path) -> None:
    engines = [
        build_engine(EngineOptions(model=str(tiny), num_gpu_blocks_override=40, dtype=dtype))[0]
        for dtype in ("float32", "bfloat16")
    ]
    request = Request("a", array("i", range(20)))
    for engine in engines:
        engine.add_request(request)
    first, second = (next(iter(engine.scheduler.waiting)).block_hashes for engine in engines)
    assert first and first != second


def cached_tokens(options: EngineOptions) -> int:
    """Return the cached tokens of one prompt of 100 in a new engine that is closed afterwards."""
    engine, _ = build_engine(options)
    engine.add_request(Request("a", array("i", range(100)), SamplingParams(temperature=0.0, max_tokens=2)))
    outputs = []
    while engine.has_work:
        outputs += engine.step(time.monotonic())
    engine.close()
    return outputs[0].num_cached_tokens


@pytest.mark.usefixtures("patient_store")
def test_what_one_engine_computed_another_on_the_same_folder_loads(tiny: Path, tmp_path: Path) -> None:
    options = EngineOptions(model=str(tiny), num_gpu_blocks_override=40, kv_store=str(tmp_path / "kv"))
    assert [cached_tokens(options) for _ in range(2)] == [0, 96]
    others = (replace(options, block_size=32), replace(options, dtype="float32"), replace(options, kv_store=None))
    assert [cached_tokens(other) for other in others] == [0, 0, 0]
    assert (tmp_path / "kv").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "kv").iterdir()} == {0o600}


def test_a_folder_that_cannot_be_used_is_found_before_the_model_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    (tmp_path / "open").mkdir(mode=0o755)
    for name, message in (("file", "file: File exists"), ("open", "is open to others .* chmod 700")):
        with pytest.raises(ConfigError, match=message):
            build_engine(EngineOptions(model="/nowhere", kv_store=str(tmp_path / name)))


def test_a_server_needs_a_secret_that_is_long_and_private(tmp_path: Path) -> None:
    pytest.importorskip("redis")
    short, public = tmp_path / "short", tmp_path / "public"
    for path, text, mode in ((short, "x" * 31 + "\n", 0o600), (public, "x" * 64, 0o604)):
        path.write_text(text, encoding="utf-8")
        path.chmod(mode)
    refused = ((None, "openssl rand -hex 32"), ("/nowhere", "No such file"), (short, "31 bytes"), (public, "mode 604"))
    for path, message in refused:
        options = EngineOptions(model="/nowhere", kv_store="redis://h:1/0", kv_store_secret=path and str(path))
        with pytest.raises(ConfigError, match=message):
            check_engine_options(options)


def test_the_home_folder_may_be_written_as_a_tilde(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    engine, _ = build_engine(EngineOptions(model=str(tiny), num_gpu_blocks_override=40, kv_store="~/a/kv"))
    engine.close()
    assert (tmp_path / "a" / "kv").is_dir()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 24}, "multiple of 16"),
        ({"block_size": 0}, "at least 16"),
        ({"scheduling_policy": "sjf"}, "choose one of lpm, fcfs, priority"),
        ({"max_model_len": 1}, "at least 2"),
        ({"max_num_seqs": 0}, "at least 1"),
        ({"max_num_batched_tokens": 8}, "--max-num-batched-tokens 8 is smaller than --max-num-seqs 256"),
        ({"page_charge": "floor"}, "choose one of exact, ceil"),
        ({"page_charge": "ceil"}, "needs --page-aligned-scheduling"),
        ({"page_aligned_scheduling": True, "max_num_batched_tokens": 260}, "raise it to 272 or lower --max-num-seqs"),
        ({"kv_store": "x", "enable_prefix_caching": False}, "nothing can be stored without the prefix cache"),
        ({"kv_store": ""}, "kv_store is empty; name a folder or a URL"),
        ({"kv_store": "redis://:hunter2@h:1/0"}, "a password does not belong into the URL"),
        ({"kv_store": "redis://:hun/ter2@h:1/0"}, "its URL is invalid; write redis://host:port/db"),
        ({"kv_store": "x,redis://h:1/0?timeout=9"}, "unknown option 'timeout'; known: db, ssl_ca_certs"),
        ({"kv_store": "rediss://h:1/name"}, "write rediss://host:port/db, db a number"),
        ({"kv_store": "redis:///0"}, "write redis://host:port/db"),
        ({"kv_store": "redis+cluster://h:1,:hunter2@g:1"}, "a password does not belong into the URL"),
        ({"kv_store": "redis+cluster://h:1,g:port"}, "its URL is invalid"),
        ({"kv_store": "redis+cluster://h:1,"}, r"write redis\+cluster://host:port,host:port"),
        ({"kv_store": "rediss+cluster://h:1/2"}, r"write rediss\+cluster://host:port,host:port"),
        ({"kv_store": "redis+cluster://h:1?db=2"}, "unknown option 'db'; known: ssl_ca_certs"),
        ({"kv_store": "unix://"}, "name the socket"),
        ({"kv_store": "memcached://:hunter2@h:1"}, "unknown kind of URL; known: redis, rediss, unix"),
        ({"kv_store_ttl": 1}, "at least 60"),
        ({"kv_store_size": "much"}, "kv_store_size: 'much' is not a size; write a number and a unit"),
        ({"kv_store_size": "1MiB"}, "kv_store_size is 1.0 MiB; it must be at least 64.0 MiB"),
        ({"page_aligned_scheduling": True, "long_prefill_token_threshold": 15}, "raise it to 16 or set it to 0"),
        ({"gpu_memory_utilization": 0.9, "device": "cpu"}, "--gpu-memory-utilization is for GPUs.*use --memory-limit"),
        ({"gpu_memory_utilization": 0.0}, "must be at least 0.01"),
        ({"gpu_memory_utilization": 1.1}, "must be at most 1"),
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size 2: a model is not split over GPUs; use --replicas 2"),
    ],
)
def test_values_that_cannot_work_are_refused_before_loading(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_engine_options(replace(EngineOptions(), **change))  # type: ignore[arg-type]


def test_more_positions_than_the_model_knows_are_refused(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="the model supports"):
        build_engine(EngineOptions(model=str(tiny), max_model_len=10**6))


def test_a_pool_that_does_not_fit_is_refused_with_the_numbers(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="does not fit"):
        build_engine(EngineOptions(model=str(tiny), kv_cache_memory="4000GiB"))


def test_a_limit_on_memory_is_all_there_is_to_count_on(tiny: Path) -> None:
    def kv_bytes(limit: str | None) -> int:
        return build_engine(EngineOptions(model=str(tiny), memory_limit=limit, dtype="float32"))[1].kv_bytes

    assert kv_bytes("32MiB") < 0.4 * 32 * 2**20 < kv_bytes(None)
    with pytest.raises(ConfigError, match="100 B of memory is available"):
        kv_bytes("100")
    assert kv_bytes("4000GiB") == kv_bytes(None)  # what is not there cannot be counted on


@pytest.fixture
def small_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers of a GPU, with all else on the CPU: 256 MiB, of which CUDA's context holds 16 MiB."""
    load = assembly.load_model
    monkeypatch.setattr(assembly, "resolve_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(assembly, "load_model", lambda folder, **options: load(folder, **{**options, "device": "cpu"}))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (240 * MIB, 256 * MIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 0)


@pytest.mark.usefixtures("small_gpu")
def test_pool_of_a_gpu_is_its_share_less_weights_and_profile(tiny: Path) -> None:
    options = EngineOptions(model=str(tiny), dtype="float32", max_num_seqs=2**20, max_num_batched_tokens=2**20)

    def kv_bytes(profile_bytes: int = 0, **changes: object) -> int:
        given = replace(options, **changes)  # type: ignore[arg-type]
        return build_engine(given, profile=lambda loaded, tokens: profile_bytes + tokens - 2**20)[1].kv_bytes

    full = kv_bytes()
    assert 200 * MIB < full < 0.9 * 256 * MIB - 16 * MIB
    assert kv_bytes(64 * MIB) == pytest.approx(full - 64 * MIB, abs=MIB)
    assert kv_bytes(gpu_memory_utilization=0.4) == pytest.approx(full - 128 * MIB, abs=MIB)
    assert kv_bytes(kv_cache_memory="32MiB") == pytest.approx(32 * MIB, abs=MIB)
    with pytest.raises(ConfigError, match=r"300\.0 MiB of buffers.*raise --gpu-memory-utilization"):
        kv_bytes(300 * MIB)


@pytest.mark.usefixtures("small_gpu")
def test_a_gpu_that_others_use_is_refused_before_loading(monkeypatch: pytest.MonkeyPatch, tiny: Path) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (100 * MIB, 1024 * MIB))
    monkeypatch.setattr(assembly, "load_model", lambda *_, **__: pytest.fail("it was loaded"))
    with pytest.raises(ConfigError, match=r"412\.0 MiB is in use already and 100\.0 MiB is free: end other processes"):
        build_engine(EngineOptions(model=str(tiny)))
    with pytest.raises(
        ConfigError, match=r"the weights take .* only 100 B of memory .* raise --gpu-memory-utilization"
    ):
        build_engine(EngineOptions(model=str(tiny), memory_limit="100"))


@pytest.mark.usefixtures("small_gpu")
@pytest.mark.parametrize(
    ("stage", "words"),
    [
        ("mem_get_info", "starting on cuda: 2.00 GiB more was needed; end other"),
        ("load_model", "loading .* of weights: 240.0 MiB of 256.0 MiB was free.*2.00 GiB more.*smaller model"),
        ("profile", "loading .* of weights: "),
        ("ModelRunner", "allocating the KV pool of .*: .*lower --gpu-memory-utilization"),
    ],
)
def test_a_gpu_out_of_memory_at_the_start_is_one_line(
    stage: str, words: str, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> int:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...\n")

    if stage != "profile":
        monkeypatch.setattr(torch.cuda if stage == "mem_get_info" else assembly, stage, fail)
    with pytest.raises(ConfigError, match="^out of GPU memory while " + words) as caught:
        build_engine(EngineOptions(model=str(tiny)), profile=fail if stage == "profile" else lambda *_: 0)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("small_gpu")
@pytest.mark.parametrize("max_num_seqs", [1, 64, 300])
def test_without_a_profile_steps_of_the_token_budget_are_run(
    max_num_seqs: int, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps are real ones of the runner; what they take is a number here, since this GPU is one in numbers only."""
    ran: list[tuple[int, int]] = []

    def peak(run: Callable[[], list[StepResult]], device: str) -> int:
        for batch, result in zip(batches, run(), strict=True):
            assert not any(row.error for row in result.rows)
            assert all(len(row.token_ids) == 1 for row in result.rows)
            ran.append((len(batch.chunks), sum(len(chunk.token_ids) for chunk in batch.chunks)))
        return 32 * MIB

    def profile_batches(*sizes: int) -> tuple[list[Batch], int]:
        found, num_blocks = warm_up.memory_profile_batches(*sizes)
        batches.extend(found)
        return found, num_blocks

    batches: list[Batch] = []
    monkeypatch.setattr(assembly, "measure_gpu_peak_increase", peak)
    monkeypatch.setattr(assembly, "memory_profile_batches", profile_batches)
    options = EngineOptions(
        model=str(tiny),
        dtype="float32",
        attention_backend="reference",
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=300,
    )
    full = build_engine(replace(options, num_gpu_blocks_override=64), profile=lambda *_: 0)[1]
    built = build_engine(replace(options, memory_limit="128MiB"))[1]
    assert ran[0][1] == 300 and ran[1][0] == max_num_seqs and full.max_model_len >= 300
    assert built.kv_bytes * 3 / 2 <= 96 * MIB  # of two layers one is gathered
    assert max_num_seqs == 1 or built.kv_bytes > 60 * MIB


@pytest.mark.gpu
def test_an_engine_on_a_real_gpu_keeps_to_its_share(tiny: Path) -> None:
    before = device_memory("cuda")
    options = EngineOptions(model=str(tiny), device="cuda", gpu_memory_utilization=0.05, max_num_seqs=4096)
    engine, info = build_engine(replace(options, max_num_batched_tokens=4096))
    engine.add_request(Request("a", array("i", range(20)), SamplingParams(temperature=0.0, max_tokens=3)))
    while engine.has_work:
        engine.step(time.monotonic())
    after = device_memory("cuda")
    assert info.kv_bytes <= before.available - after.available + 2**21 <= 0.05 * before.limit + 2**29
