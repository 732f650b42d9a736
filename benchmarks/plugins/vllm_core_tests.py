"""vLLM's own tests/v1/core with vLLM's scheduler and with the plug-in's in its place.

    PYTHONPATH=src:plugins/src python benchmarks/plugins/vllm_core_tests.py SOURCES > vllm_core_tests.json

Runs in an environment with vLLM, pytest and pytest-asyncio; SOURCES is a source tree of the same release, from which
the files that build a scheduler are run, in a temporary folder. Of models only the configuration of facebook/opt-125m
is at hand. It is a plug-in of pytest too: HEADSTART_FORM names the class and options that replace vLLM's. The last line
is JSON.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

FORMS: dict[str, dict[str, object] | None] = {
    "vllm": None,
    "all off": {},
    "promised_blocks": {"promised_blocks": True},
    "promised_blocks, page_aligned, max_prefills 4": {
        "promised_blocks": True,
        "page_aligned": True,
        "max_prefills": 4,
    },
    "lpm_k 8": {"lpm_k": 8},
}
OPT = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 768,
    "ffn_dim": 3072,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "vocab_size": 50272,
    "max_position_embeddings": 2048,
    "word_embed_proj_dim": 768,
    "torch_dtype": "float16",
}
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "OMP_NUM_THREADS": "1"}
TESTS = "tests/v1/core"


def pytest_configure() -> None:
    """Put the plug-in's classes in the place of vLLM's, before a test imports these."""
    options = FORMS[os.environ.get("HEADSTART_FORM", "vllm")]
    if options is None:
        return
    from vllm.v1.core.sched import async_scheduler, scheduler

    from headstart_plugins.scheduling.scheduling_options import SchedulingOptions
    from headstart_plugins.vllm import AsyncScheduler, Scheduler, prefix_scheduler

    chosen = SchedulingOptions(**options)
    prefix_scheduler.read_options = lambda _: chosen
    scheduler.Scheduler, async_scheduler.AsyncScheduler = Scheduler, AsyncScheduler


def lay_model(home: Path) -> None:
    """Write the configuration of facebook/opt-125m into a cache of the hub, without weights."""
    model, revision = home / "hub" / "models--facebook--opt-125m", "0" * 40
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(revision)
    (model / "snapshots" / revision).mkdir(parents=True)
    (model / "snapshots" / revision / "config.json").write_text(json.dumps(OPT))


def outcomes(folder: Path, form: str, words: list[str], plugin: str = Path(__file__).stem) -> dict[str, str]:
    """Run tests in a form of a plug-in of pytest; return 'passed', or kind and first line of the failure, by id."""
    report = folder / "report.xml"
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = {"PYTHONPATH": os.pathsep.join(paths), "HF_HOME": str(folder / "hf"), "HEADSTART_FORM": form}
    command = [sys.executable, "-m", "pytest", "-q", "-p", plugin, "-p", "no:cacheprovider"]
    subprocess.run(
        [*command, f"--junitxml={report}", *words],
        cwd=folder,
        env={**os.environ, **ENVIRONMENT, **environment},
        stdout=sys.stderr,
    )
    found: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        bad = next((case.find(kind) for kind in ("failure", "error", "skipped") if case.find(kind) is not None), None)
        name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        found[name] = "passed" if bad is None else f"{bad.tag}: {(bad.get('message') or '').splitlines()[:1]}"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path)
    parser.add_argument("--form", action="append", choices=FORMS, default=[])
    parser.add_argument(
        "--only", action="append", default=[], help="a file or option for pytest, instead of these files"
    )
    args = parser.parse_args()
    version = args.sources / "vllm" / "_version.py"
    commit = re.search(r"commit_id = '(\w+)'", version.read_text()) if version.is_file() else None
    report: dict[str, object] = {"bench": "vllm core tests", "commit": commit and commit[1], "forms": (forms := {})}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(args.sources / "tests", folder / "tests")  # apart from the sources, which would be imported
        shutil.copy(args.sources / "pyproject.toml", folder)
        lay_model(folder / "hf")
        files = args.only or [
            str(path.relative_to(folder))
            for path in sorted((folder / TESTS).rglob("test_*.py"))
            if re.search(r"\b(create_scheduler|Scheduler)\b", path.read_text())
        ]
        alone: dict[str, str] = {}
        for form in args.form or FORMS:
            others = [f"--deselect={test}" for test, how in alone.items() if how != "passed"]
            found = outcomes(folder, form, files + others)
            alone = alone or found
            passed = sum(outcome == "passed" for outcome in found.values())
            differ = {test: how for test, how in found.items() if alone.get(test) == "passed" != how}
            forms[form] = {"tests": len(found), "passed": passed, "passed with the first form only": differ}
            print(form, forms[form], file=sys.stderr, flush=True)
        report["not passed with the first form"] = {t: how for t, how in alone.items() if how != "passed"}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
