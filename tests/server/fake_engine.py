"""A small engine that answers by repeating the prompt's tokens, with knobs for faults. No model, no torch.

EngineOptions.model is a folder with a tokenizer, and after a "?" the knobs: `step` seconds of a step, `announce`
seconds that it is said to take, `hold` tokens for each request until its `gate` is open (see Gate), `crash` and
`poison` tokens (a prompt that begins with one breaks the engine, or fails alone), `load` seconds to build, `close`
seconds to end, `die` to end the process without a word, `config` to refuse to start, `store` to tell of a store (2:
of one that is degraded), `length` tokens of context, `vocab` rows of logits, `eos` the end-of-sequence token, `behind`
a token: what follows the last one of them in the prompt is repeated.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import parse_qs, quote

from headstart.config.options import EngineOptions
from headstart.core.batch import PromptTokenBreakdown, RequestStepOutput, TokenLogprob
from headstart.core.cache.block_store import StoreStats
from headstart.core.engine_info import EngineInfo, EngineStats, PoolStats
from headstart.core.errors import ConfigError, RequestTooLargeError
from headstart.core.request import NO_DEFAULTS, FinishReason, Request, SamplingDefaults
from headstart.core.sched.token_accounting import TokenCounters

VOCAB_SIZE = 450
MAX_MODEL_LEN = 512
BLOCK_SIZE = 16
NUM_BLOCKS = 1000
HELD_SECONDS = 0.005  # of a step in which all requests are held


class Gate:
    """A barrier that requests of a fake engine wait for, as long as a test likes: a file that is there or not.

    So a test decides what happens first, however slow the processes are. The model `gate.holds(folder, 3)` gives every
    request three tokens, and the rest once the gate is open; what is not let through runs until it is aborted.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def holds(self, folder: str, tokens: int, knobs: str = "") -> str:
        """The model that is held at so many tokens, with more knobs."""
        return f"{folder}?hold={tokens}&gate={quote(str(self.path))}&{knobs}"

    def open(self) -> None:
        self.path.touch()

    def close(self) -> None:
        self.path.unlink()


class FakeEngine:
    """Every request gets one token per step; equal prompts of one domain find each other's full blocks."""

    def __init__(self, knobs: dict[str, float], gate: Path | None = None) -> None:
        self.knobs = knobs
        self.gate = gate
        self.live: dict[str, tuple[Request, int]] = {}
        self.seen: set[tuple[bytes, bytes]] = set()
        self.stored = 7
        self.on_long_step: Callable[[float], None] | None = None
        self.num_steps = self.generated = self.prompted = self.cached = self.row_errors = 0

    def add_request(self, request: Request) -> None:
        if len(request.prompt) + request.sampling.max_tokens > self.knobs.get("length", MAX_MODEL_LEN):
            raise RequestTooLargeError("it can never fit")
        if request.prompt[0] == self.knobs.get("explode"):
            raise RuntimeError("a bug in add_request")
        self.live[request.request_id] = (request, 0)

    def abort(self, request_id: str) -> bool:
        return self.live.pop(request_id, None) is not None

    @property
    def has_work(self) -> bool:
        return bool(self.live)

    def step(self, now: float) -> list[RequestStepOutput]:
        if self.on_long_step is not None and "announce" in self.knobs:
            self.on_long_step(self.knobs["announce"])
        time.sleep(self.knobs.get("step", 0.0))
        most = MAX_MODEL_LEN if self.gate is None or self.gate.exists() else self.knobs["hold"]
        ready = [request_id for request_id, (_, count) in self.live.items() if count < most]
        if not ready:
            time.sleep(HELD_SECONDS)
            return []
        self.num_steps += 1
        return [self._advance(request_id) for request_id in ready]

    def _advance(self, request_id: str) -> RequestStepOutput:
        request, count = self.live[request_id]
        first = request.prompt[0]
        if first == self.knobs.get("crash"):
            raise RuntimeError("a bug in step")
        if first == self.knobs.get("die"):
            os._exit(9)
        if first == self.knobs.get("poison") and count >= self.knobs.get("after", 0):
            del self.live[request_id]
            self.row_errors += 1
            return RequestStepOutput(request_id, finish_reason=FinishReason.ERROR, error="logits are not finite")
        cached = 0
        if count == 0:
            cached = self._look_up(request)
            self.prompted += len(request.prompt)
            self.cached += cached
        if request.sampling.max_tokens == 0:
            del self.live[request_id]
            source = PromptTokenBreakdown(shared=cached, computed=len(request.prompt) - cached)
            return RequestStepOutput(
                request_id, (), (), FinishReason.LENGTH, len(request.prompt), cached, breakdown=source
            )
        token = self.next_token(request, count)
        count += 1
        self.generated += 1
        self.live[request_id] = (request, count)
        finish = FinishReason.LENGTH if count == request.sampling.max_tokens else None
        if token in request.sampling.stop_token_ids and count > request.sampling.min_tokens:
            finish = FinishReason.STOP
        if finish is not None:
            del self.live[request_id]
        logprobs = ()
        if request.sampling.logprobs is not None:
            logprobs = (TokenLogprob(token, -0.5, ((token, -0.5), (0, -1.0))[: request.sampling.logprobs]),)
        known: tuple[TokenLogprob, ...] = ()
        if request.sampling.prompt_logprobs is not None and count == 1:
            top = tuple((other, -1.0 - other / 8) for other in range(request.sampling.prompt_logprobs))
            known = tuple(TokenLogprob(token_id, -0.25, top) for token_id in request.prompt[1:])
        breakdown = PromptTokenBreakdown(shared=cached, computed=len(request.prompt) - cached) if count == 1 else None
        return RequestStepOutput(
            request_id,
            (token,),
            logprobs,
            finish,
            len(request.prompt),
            cached,
            prompt_logprobs=known,
            breakdown=breakdown,
        )

    def next_token(self, request: Request, count: int) -> int:
        """The token that follows `count` tokens of an answer."""
        prompt, begin = request.prompt, int(self.knobs.get("behind", -1))
        start = len(prompt) - prompt[::-1].index(begin) if begin in prompt else 0
        return prompt[start + count % (len(prompt) - start)]

    def _look_up(self, request: Request) -> int:
        key = (request.domain, request.prompt.tobytes())
        if key not in self.seen:
            self.seen.add(key)
            return 0
        return (len(request.prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE

    def reset_prefix_cache(self, *, pinned: bool = False, external: bool = False) -> bool:
        if self.live:
            return False
        self.seen.clear()
        if external:
            self.stored = 0
        return True

    def close(self) -> None:
        time.sleep(self.knobs.get("close", 0.0))
        print("the fake engine was closed", file=sys.stderr, flush=True)

    def store(self) -> StoreStats:
        """Statistics of a store that has lost a block for every reason but one."""
        return StoreStats(
            num_blocks=self.stored,
            num_bytes=self.stored * 1024,
            max_bytes=2**30,
            num_segments=2,
            num_pending=6 if "close" in self.knobs else 0,
            loaded_blocks=self.num_steps,
            misses={"gone": 1, "corrupt": 2, "io": 3, "slow": self.num_steps},
            written_blocks=self.num_steps,
            lost_writes={"overload": 4},
            degraded="writing: the disk is full" if self.knobs["store"] > 1 else "",
            num_degraded=5,
            load_bytes_per_s=1e9,
        )

    def stats(self) -> EngineStats:
        held = sum(-(-(len(request.prompt) + count) // BLOCK_SIZE) for request, count in self.live.values())
        computed = self.prompted - self.cached
        return EngineStats(
            TokenCounters(
                prompt_tokens=self.prompted,
                cached_tokens=self.cached,
                shared_tokens=self.cached,
                prompt_computed_tokens=computed,
                prefill_tokens=computed,
                ideal_tokens=computed,
                computed_tokens=computed + self.generated,
                generation_tokens=self.generated,
                prefix_queries=self.prompted,
                prefix_hits=self.cached,
                num_row_errors=self.row_errors,
            ),
            PoolStats(
                num_blocks=NUM_BLOCKS,
                num_free=NUM_BLOCKS - held,
                num_loading=int(self.knobs.get("store", 0)),
            ),
            num_running=len(self.live),
            num_steps=self.num_steps,
            step_seconds=self.num_steps * self.knobs.get("step", 0.0),
            last_batch_tokens=len(self.live),
            compute_tokens_per_s=500.0,
            store=self.store() if "store" in self.knobs else None,
        )


def build_fake(options: EngineOptions) -> tuple[FakeEngine, EngineInfo]:
    """Builds what `options.model` says."""
    folder, _, query = options.model.partition("?")
    asked = {name: values[0] for name, values in parse_qs(query).items()}
    gate = asked.pop("gate", None)
    knobs = {name: float(value) for name, value in asked.items()}
    time.sleep(knobs.get("load", 0.0))
    if "config" in knobs:
        raise ConfigError("there is no such model; name another")
    if "broken" in knobs:
        raise RuntimeError("a bug while loading")
    max_model_len = int(knobs.get("length", MAX_MODEL_LEN))
    info = EngineInfo(
        model=folder,
        served_name="fake",
        vocab_size=int(knobs.get("vocab", VOCAB_SIZE)),
        max_model_len=max_model_len,
        block_size=BLOCK_SIZE,
        num_blocks=max(NUM_BLOCKS, -(-max_model_len // BLOCK_SIZE)),
        kv_bytes=NUM_BLOCKS * BLOCK_SIZE * 1024,
        dtype="float32",
        device="cpu",
        threads=1,
        attention_backend="none",
        eos_token_ids=(int(knobs["eos"]),) if "eos" in knobs else (),
        scheduling_policy=options.scheduling_policy,
        sampling_defaults=_sampling_defaults(Path(folder), options.generation_config),
    )
    return FakeEngine(knobs, None if gate is None else Path(gate)), info


def _sampling_defaults(folder: Path, source: str) -> SamplingDefaults:
    """Return those of the model; to import what reads them takes longer than the rest of this process's start."""
    if source == "auto" and not (folder / "generation_config.json").exists():
        return NO_DEFAULTS
    from headstart.openai.sampling_defaults import read_sampling_defaults

    return read_sampling_defaults(folder, source)
