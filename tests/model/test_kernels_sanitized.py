"""The kernels under AddressSanitizer and UndefinedBehaviorSanitizer: the same tests, in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headstart.model.kernels import library as load
from headstart.model.kernels.build import BuildError, find_cxx_compiler

TESTS = Path(__file__).parents[1]
FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=undefined"
SUITES = {
    "attention": ("test_cpu_attention.py", "test_packed_kv.py"),
    "products": ("test_linear.py", "test_blocks_linear.py"),
    "sampling": ("test_sampling_kernel.py",),
    "recurrent": ("test_recurrent.py",),
}
SCRIPT = """
import ctypes, math, sys
import numpy as np, pytest, torch
from headstart.model import packed_kv
from headstart.model.kernels import memory

# Memory from malloc, which the sanitizer surrounds with guards, instead of huge pages.
packed_kv._zeros = lambda size: np.zeros(size, np.uint32)

def take(arena, shape, dtype):
    size, address = math.prod(shape) * dtype.itemsize, ctypes.c_void_p()
    assert ctypes.CDLL(None).posix_memalign(ctypes.byref(address), ctypes.c_size_t(64), ctypes.c_size_t(size)) == 0
    ctypes.memset(address, 0, size)
    return torch.frombuffer((ctypes.c_char * size).from_address(address.value), dtype=dtype).view(shape)

memory.Arena.take_zeros = take
only = ["-m", "not long or long(of_a_variant=True)", "-k", "not huge_page and not takes_memory"]
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *only, *sys.argv[1:]]))
"""


@pytest.fixture(scope="module")
def environ(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that compiles and runs instrumented kernels; each variant is compiled once."""
    try:
        compiler = find_cxx_compiler(os.environ)
    except BuildError as error:
        pytest.skip(str(error))
    runtime = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    if load.kernel_library_in_use() is None or not Path(runtime.stdout.strip()).is_absolute():
        pytest.skip("no compiled kernels, or no AddressSanitizer here")
    folder = tmp_path_factory.mktemp("sanitized")
    wrapper = folder / "g++"
    wrapper.write_text(f'#!/bin/sh\nunset LD_PRELOAD\nexec "{compiler}" {FLAGS} -O1 "$@" -O1\n')
    wrapper.chmod(0o755)
    return os.environ | {
        "CXX": str(wrapper),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "LD_PRELOAD": runtime.stdout.strip(),
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONMALLOC": "malloc",  # of which every block has guards too
        "PYTHONPATH": os.pathsep.join(sys.path),
    }


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("suite", SUITES)
def test_no_kernel_touches_memory_that_is_not_its_own(environ: dict[str, str], suite: str) -> None:
    files = [str(TESTS / "model" / name) for name in SUITES[suite]]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *files], env=environ, cwd=TESTS.parent, capture_output=True, text=True
    )
    num_passed = sum(line.count(".") for line in done.stdout.splitlines() if line.endswith("%]"))
    assert done.returncode == 0 and num_passed >= 50, (done.stdout + done.stderr)[-4000:]
    assert list(Path(environ["XDG_CACHE_HOME"]).rglob("*.so"))
