"""The GPUs of the replicas of one command, each named as in CUDA_VISIBLE_DEVICES. Does not import torch."""

import ctypes
import math
import subprocess
import sys
from collections.abc import Sequence

from headstart.core.errors import ConfigError
from headstart.model.setup.sizes import GPU_UTILIZATION

VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
_COUNT = "import torch; print(torch.cuda.device_count())"


def count_gpus(device: str = "auto", driver: str = "libcuda.so.1") -> int:
    """Return the number of GPUs for processes with `device`, those that torch finds in a process of its own.

    0 on a CPU, and without NVIDIA's driver.
    """
    if device.startswith("cpu"):
        return 0
    try:
        ctypes.CDLL(driver)
    except OSError:
        return 0
    found = subprocess.run([sys.executable, "-P", "-c", _COUNT], capture_output=True, text=True, check=False)
    return int(found.stdout) if found.returncode == 0 else 0


def visible_gpu_ids(device: str, count: int, visible: str | None) -> tuple[str, ...]:
    """Return the names of the GPUs for processes with `device`: those of `visible` (the variable), or their numbers.

    () if the processes use none, or if there is no such GPU. `count`: of `count_gpus`.
    """
    index = device.partition(":")[2]
    if not count:
        return ()
    names = tuple(map(str, range(count))) if visible is None else tuple(map(str.strip, visible.split(",")))
    if not names[0].startswith("MIG-"):  # of parts of a GPU a process sees only one
        names = names[:count]
    return names[int(index) : int(index) + 1] if index else names


def check_gpu_sharing(replicas: int, gpus: Sequence[str], utilization: float | None) -> None:
    """Raise ConfigError if replicas would share a GPU, unless `utilization` is given and fits as often as needed."""
    on_one = -(-replicas // max(len(gpus), 1))
    if not gpus or on_one == 1 or (utilization is not None and on_one * utilization <= 1):
        return
    share = math.floor(100 * (GPU_UTILIZATION if utilization is None else 1.0) / on_one) / 100
    one = len(gpus) == 1
    fewer = "one server without --replicas" if one else f"--replicas {len(gpus)}"
    shared = f", or let them share: --gpu-memory-utilization {share:g} or less, of each" if share >= 0.01 else ""
    raise ConfigError(
        f"--replicas {replicas}: each has a GPU of its own, and {len(gpus)} GPU{' is' if one else 's are'} there: "
        f"use {fewer}{shared}"
    )
