"""The documentation as a site: all pages are in its navigation, and its links lead somewhere."""

import runpy
import subprocess
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(scope="module")
def site() -> dict[str, Any]:
    return runpy.run_path(str(DOCS / "site.py"))


def test_every_page_is_in_the_navigation_once(site: dict[str, Any]) -> None:
    listed = sorted(page for pages in site["NAV"].values() for page in pages)
    pages = (path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
    assert listed == sorted([*pages, *site["ALSO"].values()])


def test_links_to_other_files_of_the_repository_name_them(site: dict[str, Any], tmp_path: Path) -> None:
    page = tmp_path / "docs" / "deploy" / "envoy.md"
    text = "[how](../routing.md#access) [raw data](../../benchmarks/a.json) [`lab/x.py`](../../lab/x.py) [x](https://example.com)"
    assert site["without_links_out"](text, page, tmp_path) == (
        "[how](../routing.md#access) raw data (`benchmarks/a.json`) `lab/x.py` [x](https://example.com)"
    )


def test_the_changelog_is_a_page_of_the_site(site: dict[str, Any], tmp_path: Path) -> None:
    start, changelog = tmp_path / "docs" / "README.md", tmp_path / "CHANGELOG.md"
    text = "[upgrade notes](../CHANGELOG.md#unreleased) [overview](../README.md)"
    assert site["without_links_out"](text, start, tmp_path) == (
        "[upgrade notes](upgrade-notes.md#unreleased) overview (`README.md`)"
    )
    text = "[API](docs/api.md#errors) [Envoy](docs/deploy/envoy.md) [raw data](benchmarks/a.json)"
    assert site["without_links_out"](text, changelog, tmp_path) == (
        "[API](api.md#errors) [Envoy](deploy/envoy.md) raw data (`benchmarks/a.json`)"
    )


def test_the_site_builds_and_loads_nothing_from_elsewhere(site: dict[str, Any], tmp_path: Path) -> None:
    site["build"](tmp_path / "site")
    page = (tmp_path / "site" / "prompts" / "index.html").read_text(encoding="utf-8")
    assert "Prompts that keep hitting the cache" in page and "fonts.g" not in page
    assert "Changelog" in (tmp_path / "site" / "upgrade-notes" / "index.html").read_text(encoding="utf-8")


def test_a_broken_link_fails_the_build(site: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "README.md").write_text("# A page\n\n[there](README.md#nowhere)\n")
    monkeypatch.setitem(site["build"].__globals__, "DOCS", tmp_path)
    monkeypatch.setitem(site["build"].__globals__, "NAV", {"Start": ("README.md",)})
    monkeypatch.setitem(site["build"].__globals__, "ALSO", {})
    with pytest.raises(subprocess.CalledProcessError):
        site["build"](tmp_path / "site")
