"""Mutation testing of packages: seeded mutants, each with one changed operator, constant or branch; see README.md.

The last line of stdout is JSON. With a journal, a run that was interrupted goes on with the mutants that are missing.
"""

import argparse
import ast
import copy
import json
import os
import queue
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Add: ast.Sub, ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
SKIPPED = {".venv", ".git", "__pycache__", ".hypothesis", ".pytest_cache", ".ruff_cache", "build"}


@dataclass(slots=True)
class Mutant:
    """One change: the number of a site in a file, and after a run the outcome of the tests."""

    file: str
    line: int
    site: int
    change: str
    outcome: str = ""  # killed, timeout (counts as killed), survived
    by: str = ""  # the test that failed
    tests: int = 0  # files of tests that were to run
    cpu: float = 0.0  # seconds


class Sites(ast.NodeTransformer):
    """A transformer that lists every mutable site of a module and changes the one numbered `target`."""

    def __init__(self, target: int = -1) -> None:
        self.target = target
        self.found: list[tuple[int, str]] = []  # line and change

    def _is_due(self, node: ast.AST, change: str) -> bool:
        self.found.append((getattr(node, "lineno", 0), change))
        return len(self.found) - 1 == self.target

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        swap = SWAPS.get(type(node.ops[0]))
        if swap is not None and self._is_due(node, f"{type(node.ops[0]).__name__} -> {swap.__name__}"):
            node.ops[0] = swap()  # type: ignore[call-overload]
        return self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        swap = SWAPS.get(type(node.op))
        if swap is not None and self._is_due(node, f"{type(node.op).__name__} -> {swap.__name__}"):
            node.op = swap()  # type: ignore[assignment]
        return self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        swap = SWAPS[type(node.op)]
        if self._is_due(node, f"{type(node.op).__name__} -> {swap.__name__}"):
            node.op = swap()  # type: ignore[assignment]
        return self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        swap = SWAPS.get(type(node.op))
        if swap is not None and self._is_due(node, f"{type(node.op).__name__}= -> {swap.__name__}="):
            node.op = swap()  # type: ignore[assignment]
        return self.generic_visit(node)

    def visit_If(self, node: ast.If) -> ast.AST:
        if self._is_due(node, "if -> if not"):
            node.test = ast.UnaryOp(ast.Not(), node.test)
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, bool):
            if self._is_due(node, f"{node.value} -> {not node.value}"):
                return ast.Constant(not node.value)
        elif isinstance(node.value, int) and self._is_due(node, f"{node.value} -> {node.value + 1}"):
            return ast.Constant(node.value + 1)
        return node

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        return node  # a changed assertion fails by itself

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return node  # messages


def main() -> None:
    parser = argparse.ArgumentParser(description="Change one place at a time and check whether the tests fail.")
    parser.add_argument("--package", nargs="+", default=["src/headstart/core"])
    parser.add_argument("--tests", nargs="+", default=["tests/core", "tests/laws"])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--timeout", type=int, default=300, help="Seconds of CPU time of a process of the tests.")
    parser.add_argument("--journal", type=Path, help="A file of outcomes, one per line: what it has is not run again.")
    parser.add_argument("--nearest", action="store_true", help="Run only test files that import the changed module.")
    options = parser.parse_args()
    root = Path(__file__).resolve().parents[2]
    mutants = choose([root / package for package in options.package], root, options.count, options.seed)
    known = (
        [json.loads(line) for line in options.journal.read_text().splitlines()]
        if options.journal and options.journal.exists()
        else []
    )
    for mutant in mutants:
        for entry in known:
            if (entry["file"], entry["site"], entry["change"]) == (mutant.file, mutant.site, mutant.change):
                mutant.outcome, mutant.by = entry["outcome"], entry["by"]
                mutant.tests, mutant.cpu = entry["tests"], entry["cpu"]
    run_all([mutant for mutant in mutants if not mutant.outcome], root, options)
    for mutant in mutants:
        print(f"{mutant.outcome:9} {mutant.file}:{mutant.line} {mutant.change}", file=sys.stderr)
    killed = sum(mutant.outcome != "survived" for mutant in mutants)
    print(
        json.dumps(
            {
                "package": options.package,
                "tests": options.tests,
                "nearest": options.nearest,
                "seed": options.seed,
                "mutants": len(mutants),
                "killed": killed,
                "kill_rate": killed / len(mutants),
                "cpu_seconds": round(sum(mutant.cpu for mutant in mutants)),
                "survived": [asdict(mutant) for mutant in mutants if mutant.outcome == "survived"],
            }
        )
    )


def choose(packages: list[Path], root: Path, count: int, seed: int) -> list[Mutant]:
    """Draw mutants, without repetition, from all sites of all files of some packages."""
    sites: list[Mutant] = []
    for path in (path for package in packages for path in sorted(package.rglob("*.py"))):
        finder = Sites()
        finder.visit(ast.parse(path.read_text()))
        name = str(path.relative_to(root))
        sites += [Mutant(name, line, number, change) for number, (line, change) in enumerate(finder.found)]
    return random.Random(seed).sample(sites, min(count, len(sites)))


def changed(source: str, site: int) -> str:
    """Return the source with one site changed, without its comments."""
    tree = copy.deepcopy(ast.parse(source))
    return ast.unparse(ast.fix_missing_locations(Sites(site).visit(tree)))


def run_all(mutants: list[Mutant], root: Path, options: argparse.Namespace) -> None:
    """Run the tests on every mutant, in one copy of the checkout per job, and write each outcome into the journal.

    Raises SystemExit if they fail without a change. With `nearest` they are not run without one: read in the journal
    which test has failed.
    """
    waiting: queue.SimpleQueue[Mutant] = queue.SimpleQueue()
    for mutant in mutants:
        waiting.put(mutant)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies = [Path(folder) / str(number) for number in range(options.jobs)]
        for place in copies:
            shutil.copytree(root, place, ignore=lambda _, names: SKIPPED & set(names))
        whole = Mutant("", 0, 0, "none")
        if not options.nearest:
            run(whole, copies[0], options.tests, 10 * options.timeout)
        if whole.by:
            raise SystemExit(f"{whole.by} fails without any change")
        threads = [threading.Thread(target=lambda p=place: work(waiting, p, options)) for place in copies]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def work(waiting: "queue.SimpleQueue[Mutant]", place: Path, options: argparse.Namespace) -> None:
    """Run mutants from the queue until it is empty."""
    for mutant in taken(waiting):
        path = place / mutant.file
        source = path.read_text()
        near, far = by_distance(mutant.file, place, options.tests)
        path.write_text(changed(source, mutant.site))
        try:
            run(mutant, place, near if near and options.nearest else near + far, options.timeout)
        finally:
            path.write_text(source)
        if options.journal:
            with options.journal.open("a") as journal:
                journal.write(json.dumps(asdict(mutant)) + "\n")


def by_distance(file: str, place: Path, tests: list[str]) -> tuple[list[str], list[str]]:
    """Return the test files that import the module in `file`, and all others."""
    *folders, name = Path(file).with_suffix("").parts[1:]
    package = re.escape(".".join(folders))
    imports = re.compile(rf"(from|import) {package}\.{name}\b|from {package} import [^\n]*\b{name}\b")
    files = [
        path
        for test in tests
        for path in (sorted((place / test).rglob("test_*.py")) if (place / test).is_dir() else [place / test])
    ]
    near = {path for path in files if imports.search(path.read_text())}
    return tuple(
        [str(path.relative_to(place)) for path in files if (path in near) == wanted] for wanted in (True, False)
    )  # type: ignore[return-value]


def taken(waiting: "queue.SimpleQueue[Mutant]") -> Iterator[Mutant]:
    """Yield from the queue until it is empty."""
    while True:
        try:
            yield waiting.get_nowait()
        except queue.Empty:
            return


def run(mutant: Mutant, place: Path, tests: list[str], timeout: int) -> None:
    """Run tests of a checkout until the first failure, and write down what came of it."""
    environment = {**os.environ, "PYTHONPATH": str(place / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    words = ["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-profile", "no-shrink"]
    with tempfile.TemporaryFile() as log:  # no pipe, which processes that tests leave behind would keep open
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *words, *tests],
            cwd=place,
            env=environment,
            stdout=log,
            stderr=log,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (timeout, timeout)),
        )
        _, status, used = os.wait4(process.pid, 0)
        code = process.returncode = os.waitstatus_to_exitcode(status)
        if -code in (signal.SIGINT, signal.SIGTERM):  # the run was interrupted: no outcome
            raise SystemExit(1)
        log.seek(0)
        output = log.read().decode(errors="replace")
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    mutant.outcome = "survived" if code == 0 else "killed" if code > 0 else "timeout"
    mutant.by = failed[1] if failed else "" if code == 0 else output.strip()[-200:]
    mutant.tests, mutant.cpu = len(tests), round(used.ru_utime + used.ru_stime, 1)


if __name__ == "__main__":
    main()
