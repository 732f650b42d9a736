"""A real engine over the checking executor, for tests of what only the engine can answer. No model, no torch."""

from checking import CheckingExecutor

from headstart.config.options import EngineOptions
from headstart.core.engine import Engine
from headstart.core.engine_info import EngineInfo
from headstart.core.sched.limits import Limits
from headstart.core.sched.scheduler import Scheduler
from headstart.core.sched.scheduler_config import SchedulerConfig

VOCAB_SIZE = 450
MAX_MODEL_LEN = 256
BLOCK_SIZE = 4
NUM_BLOCKS = 129


def build_checked(options: EngineOptions) -> tuple[Engine, EngineInfo]:
    """128 usable blocks of 4 tokens; `options.model` is a folder with a tokenizer. A prompt with token 449 fails."""
    limits = Limits(max_batched_tokens=256, max_seqs=16, max_model_len=MAX_MODEL_LEN)
    scheduler = Scheduler(SchedulerConfig(NUM_BLOCKS, BLOCK_SIZE, limits, policy="lpm"))
    executor = CheckingExecutor(NUM_BLOCKS, BLOCK_SIZE, lambda chunk: 449 in chunk.token_ids)
    info = EngineInfo(
        model=options.model,
        served_name="checked",
        vocab_size=VOCAB_SIZE,
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS - 1,
        kv_bytes=NUM_BLOCKS * 1024,
        dtype="float32",
        device="cpu",
        threads=1,
        attention_backend="none",
        eos_token_ids=(),
    )
    return Engine(scheduler, executor), info
