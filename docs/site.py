"""Build these pages as a site in site/: python docs/site.py (or: make site). Broken links and anchors are errors.

What links to a file outside docs/ names it instead, since the site has only these pages. Needs the package zensical.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

DOCS = Path(__file__).resolve().parent
NAV: dict[str, tuple[str, ...]] = {
    "Start": ("README.md", "install.md", "how-it-works.md", "troubleshooting.md"),
    "Clients": (
        "clients.md",
        "agents.md",
        "ollama.md",
        "api.md",
        "structured-output.md",
        "responses-and-messages.md",
        "json-schema-support.md",
    ),
    "Reuse": ("prompts.md", "prefix-caching.md", "cache-misses.md", "store.md", "speculation.md", "live-page.md"),
    "Operate": (
        *("configuration.md", "sizing.md", "security.md", "models.md", "cuda.md", "metrics.md", "traces.md"),
        *(
            "routing.md",
            "kv-events.md",
            "deploy/compose.md",
            "deploy/kubernetes.md",
            "deploy/envoy.md",
            "deploy/ray.md",
        ),
    ),
    "Other engines": ("plugins.md", "plugins-vllm.md"),
    "Measured": ("routing-figures.md", "benchmarks.md", "benchmarks-avx2.md", "simulation.md"),
    "Inside": ("architecture.md", "routing-decisions.md", "invariants.md", "kernels.md", "reliability.md"),
}
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")


def build(out: Path) -> None:
    """Write the site to `out`, which is replaced. Raises subprocess.CalledProcessError if a link is broken."""
    with TemporaryDirectory() as folder:
        source = Path(folder)
        shutil.copytree(DOCS, source / "docs", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
        for page in (source / "docs").rglob("*.md"):
            page.write_text(without_links_out(page.read_text(encoding="utf-8"), page, source), encoding="utf-8")
        (source / "zensical.toml").write_text(settings(), encoding="utf-8")
        subprocess.run([sys.executable, "-m", "zensical", "build", "--strict"], cwd=source, check=True)
        shutil.rmtree(out, ignore_errors=True)
        shutil.move(source / "site", out)


def without_links_out(text: str, page: Path, root: Path) -> str:
    """Return a page whose links to files outside docs/ are their paths in the repository."""

    def named(link: re.Match[str]) -> str:
        label, target = link[1], link[2].partition("#")[0]
        path = (page.parent / target).resolve()
        if "://" in target or not target or path.is_relative_to(root.resolve() / "docs"):
            return link[0]
        name = f"`{path.relative_to(root.resolve())}`"
        return name if label.strip("`") == name.strip("`") else f"{label} ({name})"

    return LINK.sub(named, text)


def settings() -> str:
    """Return the site's settings, in TOML: the navigation by what a reader wants."""
    parts = (f'{{"{title}" = [{", ".join(map(repr, pages))}]}}' for title, pages in NAV.items())
    nav = ",\n".join(parts)
    return f"""[project]
site_name = "Headstart"
site_description = "Serves language models without computing the same prefix twice"
nav = [{nav}]

[project.theme]
font = false
features = ["navigation.indexes", "navigation.top", "content.code.copy", "search.highlight"]
palette = [{{ media = "(prefers-color-scheme: light)", scheme = "default" }},
           {{ media = "(prefers-color-scheme: dark)", scheme = "slate" }}]
"""


if __name__ == "__main__":
    build(DOCS.parent / "site")
