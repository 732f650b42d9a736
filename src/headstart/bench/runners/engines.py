"""What benchmarks on an engine need to know, and how they have one built."""

from collections.abc import Callable
from dataclasses import dataclass

from headstart.config.options import EngineOptions
from headstart.core.engine import Engine, EngineInfo

BuildEngine = Callable[..., tuple[Engine, EngineInfo]]
"""`assembly.build_engine`, or a fake of the same form: (options, *, cache_aware_accounting=True)."""

BUNDLED = "bundled intent model"
"""What reports call the model in the package."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What every benchmark on an engine needs to know, whatever it measures."""

    build: BuildEngine
    model: str  # folder or hub id; empty: the bundled model
    label: str  # what the report calls the model
    dtype: str = "auto"
    threads: int = 0
    seed: int = 0
    quantization: str = "none"

    def options(self, *, num_blocks: int, max_batched_tokens: int = 2048, caching: bool = True) -> EngineOptions:
        """Engine options for a bench that knows how large a pool it needs."""
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
    """What a report says about an engine."""
    return {
        "dtype": info.dtype,
        "device": info.device,
        "attention_backend": info.attention_backend,
        "block_size": info.block_size,
        "num_blocks": info.num_blocks,
        "vocab_size": info.vocab_size,
    }
