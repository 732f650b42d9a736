"""HeadstartConnector: vLLM's prefix cache on disk and in Redis, across restarts and servers (docs/plugins-vllm.md).

vLLM makes two of it: one beside the scheduler, which plans, and one in the worker, which copies. Both open the store,
so they need not be in one process; only the worker writes.
"""

from collections.abc import Iterable
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from headstart.store.tiers.chained_store import ChainedStore, open_store
from headstart_plugins.vllm.store_planner import StoreMetadata, StorePlanner, StoreReport
from headstart_plugins.vllm.store_settings import check_supported, read_settings, store_shape
from headstart_plugins.vllm.store_worker import StoreWorker


class HeadstartConnector(KVConnectorBase_V1):
    """Loads are asynchronous: a request waits for its blocks while others are computed."""

    _cache_hit_source = CacheHitSource.DISK

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        """Open the store. Raises ValueError for what is not supported, ConfigError for an unusable folder or URL."""
        super().__init__(vllm_config, role, kv_cache_config)
        check_supported(vllm_config, kv_cache_config)
        settings = read_settings(self._kv_transfer_config.kv_connector_extra_config)
        shape = store_shape(vllm_config, kv_cache_config)
        store = open_store(**settings._asdict(), shape=shape)
        assert store is not None
        self._planner = self._worker = None
        if role is KVConnectorRole.SCHEDULER:
            self._planner = StorePlanner(store, shape.block_size)
        else:
            self._worker = StoreWorker(store, shape.block_bytes, is_chain=isinstance(store, ChainedStore))

    # ------------------------------------------------------------------------------------------- of the scheduler

    def on_new_request(self, request: Request) -> None:
        self._plans.arrived(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        num = self._plans.num_loadable(request, num_computed_tokens)
        return num, num > 0

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._plans.allocated(request, list(blocks.get_block_ids()[0]), num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self._plans.plan(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._plans.reported(connector_output.kv_connector_worker_meta)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._plans.finished(request)
        return False, None

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a block that is not kept is a miss later."""
        return False

    # --------------------------------------------------------------------------------------------- of the worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        [group] = self._kv_cache_config.kv_cache_groups
        self._copies.register({name: kv_caches[name] for name in group.layer_names})

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._copies.begin_loads(self._transfers)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request is scheduled when all its blocks are loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: blocks are kept as a whole, at the end of the step."""

    def wait_for_save(self) -> None:
        self._copies.save(self._transfers)

    def get_finished(self, finished_req_ids: Iterable[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, self._copies.poll(self._transfers) or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._copies.failed_blocks()

    def build_connector_worker_meta(self) -> StoreReport:
        return self._copies.report()

    def shutdown(self) -> None:
        for side in (self._planner, self._worker):
            if side is not None:
                side.close()

    @property
    def _plans(self) -> StorePlanner:
        assert self._planner is not None, "called in the worker"
        return self._planner

    @property
    def _copies(self) -> StoreWorker:
        assert self._worker is not None, "called in the scheduler"
        return self._worker

    @property
    def _transfers(self) -> StoreMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StoreMetadata)
        return metadata
