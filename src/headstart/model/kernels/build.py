"""Compilation of the C++ sources in this folder: one shared object per variant, in a wheel or in a local cache.

A variant is an instruction set. The whole object is compiled for it, so the sources test the compiler's macros
(`__AVX512BF16__`, ...) and every variant exports the same names. The choice of the variant is in library.py. One more
object, HASHES, is made of the sources in hashes/ for any processor (block_hashes.py).
Uses only the standard library and no other module of this package: setup.py runs this file before installation.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Generator, Mapping
from pathlib import Path

AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", *AVX2)
VNNI = "-mavx512vnni"
BF16 = ("-mavx512bf16", VNNI)
TWIN = "amx_twin"  # the loops of amx, slow and for every processor: for tests, never chosen and not in a wheel
VARIANT_FLAGS: dict[str, tuple[str, ...]] = {
    "amx": (*AVX512, *BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
    "avx512_bf16": (*AVX512, *BF16),
    "avx512_vnni": (*AVX512, VNNI),
    "avx512": AVX512,
    "avx2": AVX2,
    TWIN: (*AVX2, "-DTWIN_TILES"),
}
FLAGS = ("-std=c++17", "-O3", "-fopenmp", "-fPIC", "-fno-math-errno", "-fvisibility=hidden")
HASHES, HASH_FLAGS = "hashes", ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden")
SOURCES = Path(__file__).parent
PACKAGED = SOURCES / "compiled"  # exists in a wheel built with a compiler; never in a checkout
COMPILERS = ("g++", "c++", "clang++")
TIMEOUT = 300  # seconds for one source


class BuildError(Exception):
    """The reason why no kernels can be built, in one line."""


def compile_kernels(
    variant: str, cache: Path, *, extra_flags: tuple[str, ...] = (), environ: Mapping[str, str]
) -> Path:
    """Return the shared object of `variant`, compiled if `cache` does not hold it yet. Raises BuildError.

    Of several processes one builds, and the others wait for it; where the file system has no locks each builds, into
    its own folder, and renames the complete file into place.
    """
    compiler = find_cxx_compiler(environ)
    flags = (*_flags(variant), *extra_flags)
    target = cache / f"{variant}-{_digest(_folder(variant), _run([compiler, '--version']), *flags)}.so"
    return target if target.exists() else _build_as(target, compiler, flags, _folder(variant))


def build_wheel_kernels(variant: str, folder: Path, *, environ: Mapping[str, str]) -> Path:
    """Compile `variant` for a wheel, into `folder`, under the name that `packaged` looks for. Raises BuildError."""
    return _build_as(folder / _packaged_name(variant), find_cxx_compiler(environ), _flags(variant), _folder(variant))


def packaged_library(variant: str) -> Path | None:
    """Return the shared object of `variant` in the package; None if none is built from these sources."""
    path = PACKAGED / _packaged_name(variant)
    return path if path.exists() else None


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Return the folder of built kernels, below XDG_CACHE_HOME or else ~/.cache."""
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headstart" / "kernels"


def find_cxx_compiler(environ: Mapping[str, str]) -> str:
    """Return CXX, else the first C++ compiler on the path. Raises BuildError if there is none."""
    names = (environ["CXX"],) if environ.get("CXX") else COMPILERS
    for name in names:
        found = shutil.which(name, path=environ.get("PATH"))
        if found is not None:
            return found
    raise BuildError(f"no C++ compiler ({', '.join(names)}) on the path: install g++ for faster kernels")


def _flags(variant: str) -> tuple[str, ...]:
    return HASH_FLAGS if variant == HASHES else (*FLAGS, *VARIANT_FLAGS[variant])


def _folder(variant: str) -> Path:
    """Return the folder of its sources, which are compiled separately; headers (*.h) are only part of the digest."""
    return SOURCES / HASHES if variant == HASHES else SOURCES


def _packaged_name(variant: str) -> str:
    """Return a name from sources and flags only: the installing machine may have another compiler, or none."""
    return f"{variant}-{_digest(_folder(variant), *_flags(variant))}.so"


def _digest(folder: Path, *settings: str) -> str:
    """Return a digest of `settings` and of the content of all sources in `folder`."""
    digest = hashlib.sha256()
    for part in settings:
        digest.update(part.encode() + b"\0")
    for file in sorted([*folder.glob("*.cpp"), *folder.glob("*.h")]):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:24]


@contextlib.contextmanager
def _alone(folder: Path) -> Generator[None]:
    """Wait until no other process holds `folder`, and hold it; a process that dies lets go. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _build_as(target: Path, compiler: str, flags: tuple[str, ...], folder: Path) -> Path:
    """Compile to `target`, unless another process does; the file appears complete or not at all."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _alone(target.parent), tempfile.TemporaryDirectory(prefix=".build-", dir=target.parent) as scratch:
            if not target.exists():
                os.replace(_compile(compiler, flags, folder, Path(scratch)), target)
    except OSError as error:
        raise BuildError(f"cannot build in {target.parent}: {error.strerror or error}") from None
    return target


def _compile(compiler: str, flags: tuple[str, ...], folder: Path, scratch: Path) -> Path:
    """Compile all sources in parallel, then link them; return the shared object in `scratch`."""
    sources = sorted(folder.glob("*.cpp"))
    objects = [scratch / f"{source.stem}.o" for source in sources]
    running = [
        subprocess.Popen(
            [compiler, *flags, "-c", str(source), "-o", str(made)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for source, made in zip(sources, objects, strict=True)
    ]
    try:
        for process in running:
            _, errors = process.communicate(timeout=TIMEOUT)
            if process.returncode != 0:
                raise BuildError(f"{compiler} failed: {_first_error(errors)}")
    except subprocess.TimeoutExpired:
        raise BuildError(f"{compiler} took longer than {TIMEOUT} s") from None
    finally:
        for process in running:
            process.kill()
            process.wait()
    target = scratch / "kernels.so"
    _run([compiler, *flags, "-shared", *map(str, objects), "-o", str(target)])
    return target


def _run(command: list[str]) -> str:
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    if done.returncode != 0:
        raise BuildError(f"{command[0]} failed: {_first_error(done.stderr)}")
    return done.stdout


def _first_error(errors: str) -> str:
    lines = errors.strip().splitlines()
    return next((line for line in lines if "error" in line), lines[0] if lines else "it gave no reason")
