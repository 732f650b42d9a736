"""Build these pages as a site in site/: python docs/site.py (or: make site). Broken links and anchors are errors.

What links to a file outside docs/ names it instead, since the site has only these pages and the changelog. Needs the
package zensical.
"""

import os
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
    "Measured": ("benchmarks.md", "simulation.md"),
    "Changes": ("upgrade-notes.md",),
    "Inside": ("architecture.md", "routing-decisions.md", "invariants.md", "kernels.md", "reliability.md"),
}
ALSO = {"CHANGELOG.md": "upgrade-notes.md"}  # of the root, and its place in the site
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")


def build(out: Path) -> None:
    """Write the site to `out`, which is replaced. Raises subprocess.CalledProcessError if a link is broken."""
    with TemporaryDirectory() as folder:
        source = Path(folder)
        shutil.copytree(DOCS, source / "docs", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
        for page in (source / "docs").rglob("*.md"):
            page.write_text(without_links_out(page.read_text(encoding="utf-8"), page, source), encoding="utf-8")
        for name, place in ALSO.items():
            text = (DOCS.parent / name).read_text(encoding="utf-8")
            (source / "docs" / place).write_text(without_links_out(text, source / name, source), encoding="utf-8")
        (source / "zensical.toml").write_text(settings(), encoding="utf-8")
        subprocess.run([sys.executable, "-m", "zensical", "build", "--strict"], cwd=source, check=True)
        shutil.rmtree(out, ignore_errors=True)
        shutil.move(source / "site", out)


def without_links_out(text: str, page: Path, root: Path) -> str:
    """Return a page whose links to files that the site does not have are their paths in the repository.

    A page above docs/ is read as one that is moved into it.
    """
    docs = root.resolve() / "docs"
    folder = page.parent.resolve() if page.resolve().is_relative_to(docs) else docs

    def named(link: re.Match[str]) -> str:
        label, (target, mark, anchor) = link[1], link[2].partition("#")
        if "://" in target or not target:
            return link[0]
        path = (page.parent / target).resolve()
        name = path.relative_to(root.resolve()).as_posix()
        path = docs / ALSO[name] if name in ALSO else path
        if path.is_relative_to(docs):
            return f"[{label}]({os.path.relpath(path, folder)}{mark}{anchor})"
        return f"`{name}`" if label.strip("`") == name else f"{label} (`{name}`)"

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
