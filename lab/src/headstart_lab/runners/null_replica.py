"""A real `headstart serve` with an engine without a model, for experiments on everything outside the engine.

The front end, the scheduler and the shutdown are those of every server; a step computes nothing and takes a fixed
time.
"""

import argparse
import time

from headstart.bundled import bundled_intent_model_folder
from headstart.config.options import EngineOptions, ServerOptions
from headstart.core.batch import Batch, StepResult
from headstart.core.engine import Engine
from headstart.core.engine_info import EngineInfo
from headstart.core.sched.limits import Limits
from headstart.core.sched.scheduler import Scheduler
from headstart.core.sched.scheduler_config import SchedulerConfig
from headstart.openai.tokenizer.tokenizer import Tokenizer
from headstart.server.run_server import serve
from headstart_lab.runners.null_executor import NullExecutor

NAME = "null"
HEARTBEAT_SECONDS = 60.0  # on a busy machine the engine may not be scheduled for longer than the default timeout
STEP_SECONDS = 0.005
MAX_MODEL_LEN = 2048
NUM_BLOCKS = 2048


class _PacedExecutor(NullExecutor):
    """A null executor with a fixed step time."""

    def execute(self, batch: Batch) -> StepResult:
        time.sleep(STEP_SECONDS)
        return super().execute(batch)


def build_null(options: EngineOptions) -> tuple[Engine, EngineInfo]:
    """Return an engine with the bundled model's tokenizer and without its weights."""
    folder = bundled_intent_model_folder()
    vocab_size, blocks = Tokenizer.from_folder(folder).vocab_size, options.num_gpu_blocks_override or NUM_BLOCKS
    limits = Limits(options.max_num_batched_tokens, options.max_num_seqs, MAX_MODEL_LEN)
    engine = Engine(
        Scheduler(SchedulerConfig(blocks, options.block_size, limits)),
        _PacedExecutor(blocks, options.block_size, vocab_size),
    )
    info = EngineInfo(
        model=str(folder),
        served_name=NAME,
        vocab_size=vocab_size,
        max_model_len=MAX_MODEL_LEN,
        block_size=options.block_size,
        num_blocks=blocks - 1,
        kv_bytes=0,
        dtype="none",
        device="cpu",
        threads=1,
        attention_backend="none",
        eos_token_ids=(),
    )
    return engine, info


def main() -> int:
    """Serve until a signal; exit codes as server.serve. The engine process imports this module, so run it with -m."""
    parser = argparse.ArgumentParser(prog="null_replica", description="A server without a model.")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--prompt-log-size", type=int, default=0)
    given = parser.parse_args()
    quiet = ServerOptions(
        port=given.port,
        access_log="none",
        stats_interval=0.0,
        heartbeat_timeout=HEARTBEAT_SECONDS,
        prompt_log_size=given.prompt_log_size,
    )
    return serve(build_null, EngineOptions(), quiet)
