"""Compiles the CPU kernels into a wheel, where there is a compiler; all else is said in pyproject.toml.

Without a compiler, or with HEADSTART_KERNELS=none, the wheel is one for every platform and has only the sources. They
are then compiled on first use, as in an editable install, or torch's operators do the work.

With HEADSTART_CORE=compiled the wheel also has headstart.core compiled by mypyc, beside its source: scheduling a step
then takes half to two thirds of the time. Another version of Python than the one that builds uses the source.
"""

import importlib.util
import os
import platform
import sys
from pathlib import Path
from types import ModuleType

from setuptools import Distribution, Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

KERNELS = Path("headstart", "model", "kernels")
COMPILE_CORE = os.environ.get("HEADSTART_CORE") == "compiled"
RECORDS = ("__init__", "batch", "block_store", "engine_info", "request")  # msgspec reads their types


def load_builder() -> ModuleType:
    """kernels/build.py by its path, since headstart is not installed yet."""
    spec = importlib.util.spec_from_file_location("build_kernels", Path(__file__).parent / "src" / KERNELS / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BUILDER = load_builder()


def can_compile() -> bool:
    """Whether kernels are to be compiled, and can be."""
    if sys.platform != "linux" or platform.machine() != "x86_64" or os.environ.get("HEADSTART_KERNELS") == "none":
        return False
    try:
        return bool(BUILDER.find_cxx_compiler(os.environ))
    except BUILDER.BuildError:
        return False


def core_extensions() -> list[Extension]:
    """The modules of headstart.core as extensions. They are one library, so that they call one another directly."""
    if not COMPILE_CORE or not {"bdist_wheel", "build_ext"} & set(sys.argv):
        return []  # an sdist; the step that says that mypy is needed; or a checkout, where it would hide later edits
    from mypyc.build import mypycify

    modules = sorted(str(path) for path in Path("src", "headstart", "core").rglob("*.py") if path.stem not in RECORDS)
    # A protocol's method with a docstring only is a default that does nothing.
    return mypycify(
        ["--disable-error-code=abstract", *modules],
        opt_level="2",
        debug_level="0",
        multi_file=True,
        group_name="headstart_core",
    )


class BuildKernels(build_py):
    """Adds the compiled kernels to what is packaged. A compiler that fails leaves them out and says so."""

    def run(self) -> None:
        super().run()
        if self.editable_mode or not can_compile():
            return
        folder = Path(self.build_lib) / KERNELS / BUILDER.PACKAGED.name
        for variant in (*(name for name in BUILDER.VARIANT_FLAGS if name != BUILDER.TWIN), BUILDER.HASHES):
            try:
                BUILDER.build_wheel_kernels(variant, folder, environ=os.environ)
            except BUILDER.BuildError as error:
                self.warn(f"no kernels for {variant} in this wheel: {error}")


class MaybeCompiled(Distribution):
    """Kernels belong to a platform, as extension modules do; they are none, so setuptools has to be told."""

    def has_ext_modules(self) -> bool:
        return COMPILE_CORE or can_compile()


class Wheel(bdist_wheel):
    """One wheel for every Python: kernels are called through ctypes, and a compiled core's files name their Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


setup(
    distclass=MaybeCompiled,
    cmdclass={"build_py": BuildKernels, "bdist_wheel": Wheel},
    ext_modules=core_extensions(),
    setup_requires=["mypy>=2.4,<3"] if COMPILE_CORE else [],
)
