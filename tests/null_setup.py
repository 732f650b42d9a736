"""A setup whose engines are real but for the executor, which computes nothing."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from headstart.config.options import EngineOptions
from headstart.core.batch import Batch, RowError, RowErrorKind, RowResult, StepResult
from headstart.core.engine import Engine
from headstart.core.engine_info import EngineInfo
from headstart.core.sched.scheduler import Scheduler
from headstart.core.sched.scheduler_config import SchedulerConfig
from headstart.engine.engine_checks import step_limits_of
from headstart.measurement.runner import EngineSetup
from headstart.model.weights.init_model import write_random_model
from headstart_lab.runners.null_executor import NullExecutor

VOCAB_SIZE = 1000


class FailingExecutor(NullExecutor):
    """Every row fails alone."""

    def execute(self, batch: Batch) -> StepResult:
        return StepResult(
            tuple(RowResult(error=RowError(RowErrorKind.NON_FINITE, "planted")) for _ in batch.chunks), 0.0
        )


class ForgetfulExecutor(NullExecutor):
    """Never samples the same token twice, as if KV had been mixed up."""

    def execute(self, batch: Batch) -> StepResult:
        result = super().execute(batch)
        self.vocab_size += 1
        return result


def build_with(executor: type[NullExecutor], info: dict[str, object]) -> Callable[..., tuple[Engine, EngineInfo]]:
    """A stand-in for `assembly.build_engine`."""

    def build(options: EngineOptions, *, charge_cached: bool = False) -> tuple[Engine, EngineInfo]:
        num_blocks = (options.num_gpu_blocks_override or 256) + 1
        limits = step_limits_of(options, max_model_len=4096, on_cpu=True)
        scheduler = Scheduler(
            SchedulerConfig(
                num_blocks,
                options.block_size,
                limits,
                enable_prefix_caching=options.enable_prefix_caching,
                policy=options.scheduling_policy,
                lpm_k=options.lpm_k,
                charge_cached=charge_cached,
            )
        )
        engine = Engine(scheduler, executor(num_blocks, options.block_size, VOCAB_SIZE))
        described = EngineInfo(
            model="",
            served_name="null",
            vocab_size=VOCAB_SIZE,
            max_model_len=2048,
            block_size=options.block_size,
            num_blocks=num_blocks - 1,
            kv_bytes=0,
            dtype="float32",
            device="cpu",
            threads=1,
            attention_backend="none",
            eos_token_ids=(),
        )
        return engine, replace(described, **info)

    return build


@pytest.fixture
def make_setup() -> Callable[..., EngineSetup]:
    """Setup on engines without a model; `executor` may be a broken one, other keywords change the EngineInfo."""

    def make(executor: type[NullExecutor] = NullExecutor, **info: object) -> EngineSetup:
        return EngineSetup(build_with(executor, info), model="", label="null", threads=1, seed=7)

    return make


@pytest.fixture
def failing() -> type[NullExecutor]:
    return FailingExecutor


@pytest.fixture
def forgetful() -> type[NullExecutor]:
    return ForgetfulExecutor


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny model with random weights, float32."""
    folder = tmp_path_factory.mktemp("bench") / "tiny"
    return str(write_random_model("tiny", folder, std=0.2, dtype="float32", progress=False))
