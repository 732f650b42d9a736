"""The settings of the store connector, what it refuses, and the fingerprint of what vLLM computes."""

import hashlib
import json
import os
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from huggingface_hub import snapshot_download
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig

from headstart.model.setup.sizes import parse_bytes
from headstart.store.format import StoredBlockFormat
from headstart.store.tiers.tier import StoreTierLocations, parse_tier_places, read_shared_secrets
from headstart_plugins.vllm.host import HOST_VERSION

FORM = 1  # of the stored blocks: a layer after the other, each as vLLM's CPU backend has it in memory
HASHES = ("sha256", "sha256_cbor")  # with a fixed root and 32 bytes; those of xxhash are random in every process
OPTIONS: dict[str, str | int | None] = {"folder": None, "size": "20GiB", "url": None, "secret": None, "ttl": 7 * 86_400}
MIN_TTL = 60  # seconds, as of --kv-store-ttl
PASSWORD = "HEADSTART_KV_STORE_PASSWORD"  # a variable, so that lists of processes do not show it
_CHUNK = 1 << 22


class StoreSettings(NamedTuple):
    """The arguments of `open_store`: a folder and its limit in bytes, a server and what its blocks are sealed with."""

    found: StoreTierLocations
    max_bytes: int
    password: str | None
    secrets: tuple[bytes, ...]
    ttl: int


def read_settings(extra: dict[str, Any]) -> StoreSettings:
    """Return the settings in `kv_connector_extra_config`. Raises ValueError for unknown or missing ones and those of
    another type, ConfigError for a size, URL or file of a secret that cannot be used.
    """
    for name, value in extra.items():
        if name not in OPTIONS:
            raise ValueError(f"kv_connector_extra_config has no option {name!r}; it has {', '.join(OPTIONS)}")
        if name == "ttl" and not (type(value) is int and value >= MIN_TTL):
            raise ValueError(f"kv_connector_extra_config.ttl is {value!r}; it must be at least {MIN_TTL} seconds")
        if name != "ttl" and not isinstance(value, str):
            raise ValueError(f"kv_connector_extra_config.{name} is {value!r}; it must be a string")
    given: dict[str, Any] = {**OPTIONS, **extra}
    if not given["folder"] and not given["url"]:
        raise ValueError("kv_connector_extra_config: name the folder of the store, the url of a server, or both")
    found = parse_tier_places(",".join(filter(None, (given["folder"], given["url"]))))
    secrets = read_shared_secrets(given["secret"]) if found.url else ()
    return StoreSettings(found, parse_bytes(given["size"]), os.environ.get(PASSWORD), secrets, given["ttl"])


def check_supported(config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raise ValueError, which names the reason, for what the connector cannot serve."""
    transfer, groups = config.kv_transfer_config, kv_cache_config.kv_cache_groups
    assert transfer is not None
    algorithm = config.cache_config.prefix_caching_hash_algo
    kinds = sorted({type(group.kv_cache_spec).__name__ for group in groups})
    refused = {
        f"kv_load_failure_policy is {transfer.kv_load_failure_policy!r}, with which a block that cannot be read ends "
        'its request: set it to "recompute"': transfer.kv_load_failure_policy != "recompute",
        f'kv_role is {transfer.kv_role!r}: set it to "kv_both"': transfer.kv_role != "kv_both",
        f"--prefix-caching-hash-algo {algorithm} gives other hashes in every process: use one of {', '.join(HASHES)}": (
            algorithm not in HASHES
        ),
        "prefix caching is off": not config.cache_config.enable_prefix_caching,
        f"the model has KV of the kinds {', '.join(kinds)}: hybrids are not supported, only full attention": (
            len(groups) != 1 or not isinstance(groups[0].kv_cache_spec, FullAttentionSpec)
        ),
        "several workers hold parts of each block: tensor and pipeline parallelism are not supported": (
            config.parallel_config.world_size != 1
        ),
        "adapters are not part of the fingerprint: --enable-lora is not supported": config.lora_config is not None,
        "drafts have KV of their own: --speculative-config is not supported": config.speculative_config is not None,
        f"it runs on CPUs, not on {current_platform.device_type}": not current_platform.is_cpu(),
    }
    reasons = [reason for reason, applies in refused.items() if applies]
    if reasons:
        raise ValueError("HeadstartConnector does not start: " + "; ".join(reasons))


def store_shape(config: VllmConfig, kv_cache_config: KVCacheConfig) -> StoredBlockFormat:
    """Return the shape of the stored blocks: its fingerprint is equal exactly if KV may be shared.

    It names the weights, the model's configuration, dtypes, layout and layers, the releases of vLLM and torch, the
    instruction set, and the root of vLLM's block hashes, which name tokens, salts and images, but none of these.
    """
    [group] = kv_cache_config.kv_cache_groups
    spec, model, cache = group.kv_cache_spec, config.model_config, config.cache_config
    algorithm = cache.prefix_caching_hash_algo
    parts = {
        "form": FORM,
        "weights": weights_digest(model.model, model.revision),
        "model": model.hf_config.to_dict(),
        "dtypes": [str(model.dtype), str(cache.cache_dtype), str(model.quantization)],
        "layers": [spec.page_size_bytes, len(group.layer_names), repr(spec)],
        "layout": kv_cache_config.kv_cache_layout,
        "hashes": [algorithm, resolve_none_hash_seed(get_hash_fn_by_name(algorithm))],
        "releases": [HOST_VERSION, torch.__version__, torch.backends.cpu.get_cpu_capability()],
    }
    fingerprint = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).digest()
    return StoredBlockFormat(fingerprint, spec.block_size, spec.page_size_bytes * len(group.layer_names))


@lru_cache(maxsize=1)  # both roles of one process ask for the same
def weights_digest(model: str, revision: str | None) -> str:
    """Return a digest of all weight files of a folder or a model of the hub that is in the local cache.

    Raises ValueError if there are none.
    """
    folder = Path(model)
    if not folder.is_dir():
        folder = Path(snapshot_download(model, revision=revision, local_files_only=True))
    files = sorted(path for kind in ("*.safetensors", "*.bin", "*.pt", "*.gguf") for path in folder.glob(kind))
    if not files:
        raise ValueError(f"HeadstartConnector does not start: there are no weight files in {folder}")
    digest, buffer = xxhash.xxh3_128(), bytearray(_CHUNK)
    for path in files:
        digest.update(path.name.encode())
        with path.open("rb") as file:
            while num := file.readinto(buffer):
                digest.update(memoryview(buffer)[:num])
    return digest.hexdigest()
