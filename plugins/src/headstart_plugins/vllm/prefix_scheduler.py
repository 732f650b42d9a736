"""vLLM's scheduler with promised blocks, an order by cached prefix, page-aligned chunks and bounded prefills.

Three of vLLM's methods are overridden, and its waiting queue is replaced only for another order; with all options off,
each override returns what vLLM's method returns. These are private parts of vLLM, so versions.py names the releases.

vLLM puts a block into its prefix cache when it schedules the chunk that fills it, but looks a request up only once, at
its admission. A request admitted while another one computes the same prefix in several chunks therefore computes the
rest of that prefix too. With promised blocks it waits for the other one instead.
"""

from collections import defaultdict
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler as _AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler as _Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import Request, RequestStatus

from headstart_plugins.scheduling.prefix_order import PrefixQueue
from headstart_plugins.scheduling.promised_blocks import Writer, is_promised, num_cached_blocks
from headstart_plugins.scheduling.scheduling_options import read_options

logger = init_logger(f"vllm.{__name__}")  # below vLLM's own, whose level and handler apply


class _PrefixScheduling(_Scheduler):
    """The overrides, before either scheduler of vLLM in the order of bases."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.headstart = read_options(self.vllm_config.additional_config)
        self._reads_prefixes = self._has_one_full_attention_group()
        if not self._reads_prefixes and (self.headstart.promised_blocks or self.headstart.lpm_k > 1):
            logger.warning(
                "headstart: promised_blocks and lpm_k have no effect: they need prefix caching, and a model with full "
                "attention in all layers"
            )
        self._writers: dict[bytes, list[Writer]] = {}  # running prefills by the hash of their first block
        self._num_writers = 0
        self._prefix_queue: PrefixQueue[Request] | None = None
        if self.headstart.lpm_k > 1 and self._reads_prefixes:
            if self.policy is not SchedulingPolicy.FCFS:
                raise ValueError("headstart.lpm_k needs --scheduling-policy fcfs: an order by priority is kept")
            self._prefix_queue = PrefixQueue(self.headstart.lpm_k, self._num_cached_blocks, _is_admitted)
            self.waiting = self._prefix_queue  # has the same methods
        logger.info("headstart: %s", self.headstart)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Schedule a step as vLLM does, by way of the methods below."""
        self._num_writers = -1
        if self._prefix_queue is not None:
            self._prefix_queue.begin_step()
        return super().schedule(*args, **kwargs)

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        """Return whether a waiting request may be tried in this step; otherwise vLLM skips it and keeps its place."""
        if not super()._handle_blocked_waiting_request(request):
            return False
        if request.num_computed_tokens:  # it holds blocks, so others may wait for it
            return True
        return not self._awaits_block(request) and not self._exceeds_prefills(request)

    def _reserve_prefill_lookahead(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        """Return the length of a chunk, shortened to whole blocks where at least one block is left.

        Never 0 where vLLM's own is not: for a waiting request that would end the admission of all.
        """
        num = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        end = num_computed_tokens + num
        if not self.headstart.page_aligned or end >= request.num_tokens:
            return num
        aligned = end // self.block_size * self.block_size - num_computed_tokens
        return aligned if aligned >= self.block_size else num

    # ------------------------------------------------------------------------------------------------------------

    def _awaits_block(self, request: Request) -> bool:
        """Return whether a running prefill is going to write the next block that the request misses."""
        if not self.headstart.promised_blocks or not self._reads_prefixes or not self._looks_up(request):
            return False
        writers = self._running_writers().get(request.block_hashes[0])
        return writers is not None and is_promised(
            request.block_hashes, self._num_usable_blocks(request), writers, self._is_cached
        )

    def _exceeds_prefills(self, request: Request) -> bool:
        """Return whether the request would be one prefill too many; one of at most a block is never."""
        limit = self.headstart.max_prefills
        if not limit or sum(r.status == RequestStatus.RUNNING for r in self._inflight_prefills) < limit:
            return False
        num_cached = self._num_cached_blocks(request) if self._reads_prefixes and self._looks_up(request) else 0
        return request.num_tokens - num_cached * self.block_size > self.block_size

    def _running_writers(self) -> dict[bytes, list[Writer]]:
        """Return the prefills that run or load, by their first block; counted again when one was admitted.

        Those that wait write nothing until they are admitted, so no two requests wait for each other.
        """
        if self._num_writers != len(self._inflight_prefills):
            self._num_writers = len(self._inflight_prefills)
            found: defaultdict[bytes, list[Writer]] = defaultdict(list)
            for request in self._inflight_prefills:
                is_loading = request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
                if request.block_hashes and (is_loading or request.status == RequestStatus.RUNNING):
                    num_written = 0 if is_loading else request.num_computed_tokens // self.block_size
                    found[request.block_hashes[0]].append(Writer(request.block_hashes, num_written))
            self._writers = found
        return self._writers

    def _num_cached_blocks(self, request: Request) -> int:
        return num_cached_blocks(request.block_hashes, self._num_usable_blocks(request), self._is_cached)

    def _num_usable_blocks(self, request: Request) -> int:
        """Return the blocks that could be taken from the cache: the last token is always computed."""
        return (request.num_tokens - 1) // self.block_size

    def _looks_up(self, request: Request) -> bool:
        return bool(request.block_hashes) and not request.skip_reading_prefix_cache

    def _is_cached(self, block_hash: bytes) -> bool:
        return self.kv_cache_manager.block_pool.get_cached_block(BlockHash(block_hash), [0]) is not None

    def _has_one_full_attention_group(self) -> bool:
        groups = self.kv_cache_config.kv_cache_groups
        return (
            bool(self.cache_config.enable_prefix_caching)
            and len(groups) == 1
            and isinstance(groups[0].kv_cache_spec, FullAttentionSpec)
            and groups[0].kv_cache_spec.block_size == self.block_size == self.hash_block_size
        )


def _is_admitted(request: Request) -> bool:
    """Return whether a request that was taken out of the queue runs, loads, or has ended meanwhile."""
    is_loading = request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    return is_loading or request.status == RequestStatus.RUNNING or request.is_finished()


class Scheduler(_PrefixScheduling):
    """For CPUs, where vLLM does not schedule asynchronously."""


class AsyncScheduler(_PrefixScheduling, _AsyncScheduler):
    """For GPUs, where vLLM plans a step while the one before runs."""
