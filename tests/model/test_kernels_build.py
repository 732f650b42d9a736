"""Building and choosing kernels: once per machine, by several processes at once, and never in the way of a start."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import build_kernels
import pytest

from headstart.core.errors import ConfigError
from headstart.model.kernels import build as building
from headstart.model.kernels.build import (
    BuildError,
    build_wheel_kernels,
    cache_folder,
    compile_kernels,
    find_cxx_compiler,
    packaged_library,
)
from headstart.model.kernels.library import NEEDED, VARIABLE, find_kernels, load_kernels, runnable_variants
from headstart.model.setup.doctor import make_doctor_report

RUNNABLE = runnable_variants()
pytestmark = pytest.mark.skipif(not RUNNABLE, reason="this processor runs no variant")


def has_compiler() -> bool:
    try:
        return bool(find_cxx_compiler(os.environ))
    except BuildError:
        return False


needs_compiler = pytest.mark.skipif(not has_compiler(), reason="no compiler")


@needs_compiler
def test_the_sources_build_wherever_there_is_a_compiler() -> None:
    """Or else every test of a kernel would be left out without a word."""
    for variant in RUNNABLE:
        found = load_kernels(variant)
        assert found.kernels is not None, found.note


@needs_compiler
def test_the_best_variant_is_chosen_and_every_other_can_be_forced() -> None:
    assert load_kernels("").note == RUNNABLE[0]
    for variant in RUNNABLE:
        kernels = load_kernels(variant).kernels
        assert kernels is not None and kernels.variant == variant
    assert load_kernels("none").kernels is None


@pytest.mark.parametrize("flags", [set[str](), *NEEDED.values(), {"avx512_bf16"}])
def test_before_the_tests_all_variants_are_built_that_the_processor_can_run(flags: set[str]) -> None:
    wanted = {name for name, needed in NEEDED.items() if needed <= flags}
    assert set(build_kernels.variants_for(flags)) == wanted


def test_a_variant_this_processor_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.model.kernels.library.cpu_flags", lambda: NEEDED["avx2"])
    with pytest.raises(ConfigError, match="this processor cannot run it; choose avx2, amx_twin, none"):
        load_kernels.__wrapped__("avx512")


def test_a_processor_without_avx2_gets_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.model.kernels.library.cpu_flags", frozenset)
    found = load_kernels.__wrapped__("")
    assert found.kernels is None and "AVX2" in found.note


def test_no_compiler_is_one_line_not_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = load_kernels.__wrapped__("")
    assert found.kernels is None
    assert found.note == "none: no C++ compiler (g++, c++, clang++) on the path: install g++ for faster kernels"


@needs_compiler
def test_a_compiler_that_fails_says_why_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "source"
    broken.mkdir()
    (broken / "a.cpp").write_text("int f() { return nonsense; }\n")
    monkeypatch.setattr(building, "SOURCES", broken)
    with pytest.raises(BuildError, match=r"failed: .*error: .*nonsense"):
        compile_kernels("avx2", tmp_path / "cache", environ=os.environ)
    assert list((tmp_path / "cache").iterdir()) == []


@needs_compiler
def test_a_cache_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match=r"cannot build in .*file/below"):
        compile_kernels("avx2", tmp_path / "file" / "below", environ=os.environ)


def test_cxx_chooses_the_compiler(tmp_path: Path) -> None:
    other = tmp_path / "my++"
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    assert find_cxx_compiler({"CXX": str(other), "PATH": ""}) == str(other)
    with pytest.raises(BuildError, match=r"no C\+\+ compiler \(gone\)"):
        find_cxx_compiler({"CXX": "gone", "PATH": str(tmp_path)})


@needs_compiler
def test_built_once_and_again_only_if_a_source_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.cpp").write_text("int f() { return 1; }\n")
    monkeypatch.setattr(building, "SOURCES", source)
    first = compile_kernels("avx2", tmp_path / "cache", environ=os.environ)
    written = first.stat().st_mtime_ns
    assert (
        compile_kernels("avx2", tmp_path / "cache", environ=os.environ) == first and first.stat().st_mtime_ns == written
    )
    assert compile_kernels("avx2", tmp_path / "cache", extra_flags=("-g",), environ=os.environ) != first
    (source / "b.h").write_text("// more\n")
    assert compile_kernels("avx2", tmp_path / "cache", environ=os.environ) != first


@needs_compiler
def test_what_came_with_the_package_is_used_if_it_is_of_these_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.cpp").write_text("int f() { return 1; }\n")
    monkeypatch.setattr(building, "SOURCES", source)
    monkeypatch.setattr(building, "PACKAGED", tmp_path / "compiled")
    assert packaged_library("avx2") is None
    made = build_wheel_kernels("avx2", tmp_path / "compiled", environ=os.environ)
    assert packaged_library("avx2") == made and packaged_library("avx512") is None
    assert [file.name for file in (tmp_path / "compiled").iterdir()] == [made.name]
    (source / "a.cpp").write_text("int f() { return 2; }\n")
    assert packaged_library("avx2") is None


def test_a_packaged_library_that_cannot_be_loaded_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken.so").write_bytes(b"not a library")
    monkeypatch.setattr("headstart.model.kernels.library.packaged_library", lambda variant: tmp_path / "broken.so")
    found = load_kernels.__wrapped__(RUNNABLE[-1])
    assert found.kernels is None or found.origin.startswith("compiled on this machine")


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_wheel_brings_the_kernels_and_needs_no_compiler_to_use_them(tmp_path: Path) -> None:
    """Also without one to build it: the wheel is then for every platform, and torch does the work."""
    root = Path(__file__).parents[2]
    if not has_compiler() or not (root / "setup.py").exists():
        pytest.skip("no compiler")
    copy, empty = tmp_path / "checkout", tmp_path / "empty"
    empty.mkdir()
    shutil.copytree(root / "src", copy / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__", "bundled"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(root / name, copy)
    bare = {**os.environ, "PATH": str(empty), "CXX": "", VARIABLE: "", "XDG_CACHE_HOME": str(empty)}
    code = (
        "from headstart.model.kernels.library import find_kernels; f = find_kernels(); print(f.note, f.origin, sep='|')"
    )
    expected = {
        "platform": (os.environ, "linux_x86_64", f"{RUNNABLE[0]}|built with the package"),
        "any": (bare, "any", "none: no C++ compiler (g++, c++, clang++) on the path: install g++ for faster kernels|"),
    }
    for kind, (environ, tag, note) in expected.items():
        out = tmp_path / kind
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
        build_wheel = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(out), str(copy)]
        subprocess.run(build_wheel, env=environ, check=True, capture_output=True, timeout=900)
        (wheel,) = out.iterdir()
        assert wheel.name.endswith(f"-py3-none-{tag}.whl")
        with ZipFile(wheel) as archive:
            archive.extractall(out / "site")
        found = subprocess.run(
            [sys.executable, "-c", code],
            env={**bare, "PYTHONPATH": str(out / "site")},
            capture_output=True,
            text=True,
            check=True,
            timeout=100,
        )
        assert found.stdout.strip() == note
        shutil.rmtree(copy / "build")  # setuptools would put what lies there into the next wheel


def test_doctor_says_where_the_kernels_are_from() -> None:
    found = find_kernels()
    shown = make_doctor_report().text()
    assert found.origin in shown
    assert found.kernels is None or found.origin.startswith(("built with the package", "compiled on this machine"))


COPYING_COMPILER = """#!/bin/sh
echo "$@" >> {calls}
case "$*" in
--version) exec {compiler} --version ;;
*" -shared "*) for target; do :; done; sleep 1; exec cp {built} "$target" ;;
esac
"""  # its result is that of an earlier build, after a second in which the other processes come


@needs_compiler
@pytest.mark.timeout(900)
def test_several_processes_build_at_once_and_share_torchs_openmp(tmp_path: Path) -> None:
    code = (
        "from headstart.model.kernels.library import load_kernels\n"
        f"assert load_kernels({RUNNABLE[-1]!r}).kernels is not None, load_kernels({RUNNABLE[-1]!r})\n"
        "lines = open('/proc/self/maps').read().splitlines()\n"
        "print(len({line.split()[-1] for line in lines if 'libgomp' in line or 'libiomp' in line}))\n"
    )
    quick = tmp_path / "g++-quick"
    calls = tmp_path / "calls"
    built = compile_kernels(RUNNABLE[-1], cache_folder(os.environ), environ=os.environ)
    quick.write_text(COPYING_COMPILER.format(calls=calls, compiler=find_cxx_compiler(os.environ), built=built))
    quick.chmod(0o755)
    environ = {**os.environ, "CXX": str(quick), "XDG_CACHE_HOME": str(tmp_path), VARIABLE: ""}
    running = [
        subprocess.Popen([sys.executable, "-c", code], env=environ, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    assert [process.communicate(timeout=800)[0].strip() for process in running] == ["1"] * 3
    assert len(list((tmp_path / "headstart" / "kernels").glob("*.so"))) == 1
    assert calls.read_text().count(" -shared ") == 1  # the others waited
