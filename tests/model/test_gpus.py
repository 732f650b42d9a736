"""The GPUs of replicas: their names for CUDA_VISIBLE_DEVICES, and how many replicas they may serve."""

import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.core.errors import ConfigError
from headstart.model.setup.gpus import check_gpu_sharing, count_gpus, visible_gpu_ids

MIG = "MIG-a,MIG-b,MIG-c"


@pytest.mark.parametrize(
    ("device", "count", "visible", "names"),
    [
        ("auto", 3, None, "0 1 2"),
        ("cuda", 2, "5,3,9", "5 3"),  # CUDA stops at the first name that it does not know
        ("cuda:1", 3, None, "1"),
        ("cuda:1", 2, "GPU-x, GPU-y", "GPU-y"),
        ("cuda:2", 2, None, ""),  # the replica says that it is not there
        ("auto", 0, None, ""),
        ("auto", 0, "0,1", ""),
        ("auto", 1, MIG, "MIG-a MIG-b MIG-c"),  # a process sees only one of them
        ("cuda:1", 1, MIG, "MIG-b"),
    ],
)
def test_names_are_those_that_a_process_of_one_gpu_understands(
    device: str, count: int, visible: str | None, names: str
) -> None:
    assert visible_gpu_ids(device, count, visible) == tuple(names.split())


def test_without_a_driver_there_are_no_gpus_and_torch_is_not_asked() -> None:
    torch = "import torch; print(torch.cuda.device_count())"
    expected = subprocess.run([sys.executable, "-c", torch], capture_output=True, text=True, check=True).stdout
    assert count_gpus() == int(expected)
    assert count_gpus(driver="libnot-there.so.1") == count_gpus("cpu:0") == count_gpus("cpu", "libc.so.6") == 0


@pytest.mark.parametrize(
    ("replicas", "gpus", "utilization", "words"),
    [
        (4, 2, None, r"^--replicas 4: .*2 GPUs.*use --replicas 2, or .*--gpu-memory-utilization 0\.45 or less"),
        (2, 1, 0.9, r"1 GPU is.*use one server without --replicas, or .*--gpu-memory-utilization 0\.5 or less"),
        (3, 2, 0.51, "0.5 or less"),
        (2, 1, None, r"0\.45 or less"),
        (200, 1, None, "use one server without --replicas$"),
    ],
)
def test_fewer_gpus_than_replicas_are_refused(replicas: int, gpus: int, utilization: float | None, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_gpu_sharing(replicas, [str(n) for n in range(gpus)], utilization)


@given(st.integers(1, 64), st.integers(0, 16), st.one_of(st.none(), st.floats(0.01, 1)))
def test_no_gpu_is_promised_twice(replicas: int, gpus: int, utilization: float | None) -> None:
    names = [str(n) for n in range(gpus)]
    try:
        check_gpu_sharing(replicas, names, utilization)
    except ConfigError as error:
        if "--gpu-memory-utilization" in str(error):  # the remedy works
            share = float(str(error).split("--gpu-memory-utilization ")[1].split()[0])
            check_gpu_sharing(replicas, names, share)
        return
    if gpus:
        on_one = math.ceil(replicas / gpus)
        assert on_one == 1 or (utilization is not None and on_one * utilization <= 1)
