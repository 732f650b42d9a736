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
    assert listed == sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


def test_links_to_other_files_of_the_repository_name_them(site: dict[str, Any], tmp_path: Path) -> None:
    page = tmp_path / "docs" / "deploy" / "envoy.md"
    text = "[how](../routing.md#access) [raw data](../../benchmarks/a.json) [`lab/x.py`](../../lab/x.py) [x](https://example.com)"
    assert site["without_links_out"](text, page, tmp_path) == (
        "[how](../routing.md#access) raw data (`benchmarks/a.json`) `lab/x.py` [x](https://example.com)"
    )


def test_the_site_builds_and_loads_nothing_from_elsewhere(site: dict[str, Any], tmp_path: Path) -> None:
    site["build"](tmp_path / "site")
    page = (tmp_path / "site" / "prompts" / "index.html").read_text(encoding="utf-8")
    assert "Prompts that keep hitting the cache" in page and "fonts.g" not in page


def test_a_broken_link_fails_the_build(site: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "README.md").write_text("# A page\n\n[there](README.md#nowhere)\n")
    monkeypatch.setitem(site["build"].__globals__, "DOCS", tmp_path)
    monkeypatch.setitem(site["build"].__globals__, "NAV", {"Start": ("README.md",)})
    with pytest.raises(subprocess.CalledProcessError):
        site["build"](tmp_path / "site")
