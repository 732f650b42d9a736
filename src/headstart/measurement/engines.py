"""The common setup of benchmarks on an engine, and the function that builds one."""

from collections.abc import Callable
from dataclasses import dataclass

from headstart.config.options import EngineOptions
from headstart.core.engine import Engine, EngineInfo

BuildEngine = Callable[..., tuple[Engine, EngineInfo]]
"""`assembly.build_engine`, or a fake with the same signature: (options, *, scheduler_class=Scheduler)."""

BUNDLED = "bundled intent model"
"""The name of the packaged model in reports."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The inputs of every benchmark on an engine."""

    build: BuildEngine
    model: str  # folder or hub id; empty: the bundled model
    label: str  # name of the model in the report
    dtype: str = "auto"
    threads: int = 0
    seed: int = 0
    quantization: str = "none"

    def options(self, *, num_blocks: int, max_batched_tokens: int = 2048, caching: bool = True) -> EngineOptions:
        """Return engine options with an explicit pool size."""
        return EngineOptions(
            model=self.model,
            dtype=self.dtype,
            threads=self.threads,
            num_gpu_blocks_override=num_blocks,
            max_num_batched_tokens=max_batched_tokens,
            enable_prefix_caching=caching,
            seed=self.seed,
            quantization=self.quantization,
        )


def describe(info: EngineInfo) -> dict[str, object]:
    """Return the engine's entries of a report."""
    return {
        "dtype": info.dtype,
        "device": info.device,
        "attention_backend": info.attention_backend,
        "block_size": info.block_size,
        "num_blocks": info.num_blocks,
        "vocab_size": info.vocab_size,
    }
