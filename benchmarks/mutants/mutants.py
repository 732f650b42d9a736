"""Mutation testing of a package: seeded mutants, each with one changed operator, constant or branch; see README.md.

The last line of stdout is JSON.
"""

import argparse
import ast
import copy
import json
import os
import queue
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
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
    parser.add_argument("--package", default="src/headstart/core")
    parser.add_argument("--tests", nargs="+", default=["tests/core", "tests/laws"])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=300.0, help="Seconds of one run of the tests.")
    options = parser.parse_args()
    root = Path(__file__).resolve().parents[2]
    mutants = choose(root / options.package, root, options.count, options.seed)
    began = time.monotonic()
    run_all(mutants, root, options.tests, options.jobs, options.timeout)
    killed = sum(mutant.outcome != "survived" for mutant in mutants)
    for mutant in mutants:
        print(f"{mutant.outcome:9} {mutant.file}:{mutant.line} {mutant.change}", file=sys.stderr)
    print(
        json.dumps(
            {
                "package": options.package,
                "tests": options.tests,
                "seed": options.seed,
                "mutants": len(mutants),
                "killed": killed,
                "kill_rate": killed / len(mutants),
                "seconds": round(time.monotonic() - began),
                "survived": [asdict(mutant) for mutant in mutants if mutant.outcome == "survived"],
            }
        )
    )


def choose(package: Path, root: Path, count: int, seed: int) -> list[Mutant]:
    """Draw mutants, without repetition, from all sites of all files of a package."""
    sites: list[Mutant] = []
    for path in sorted(package.rglob("*.py")):
        finder = Sites()
        finder.visit(ast.parse(path.read_text()))
        name = str(path.relative_to(root))
        sites += [Mutant(name, line, number, change) for number, (line, change) in enumerate(finder.found)]
    return random.Random(seed).sample(sites, min(count, len(sites)))


def changed(source: str, site: int) -> str:
    """Return the source with one site changed, without its comments."""
    tree = copy.deepcopy(ast.parse(source))
    return ast.unparse(ast.fix_missing_locations(Sites(site).visit(tree)))


def run_all(mutants: list[Mutant], root: Path, tests: list[str], jobs: int, timeout: float) -> None:
    """Run the tests on every mutant, in one copy of the checkout per job.

    Raises SystemExit if they fail without a change.
    """
    waiting: queue.SimpleQueue[Mutant] = queue.SimpleQueue()
    for mutant in mutants:
        waiting.put(mutant)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies = [Path(folder) / str(number) for number in range(jobs)]
        for place in copies:
            shutil.copytree(root, place, ignore=lambda _, names: SKIPPED & set(names))
        if outcome(copies[0], tests, 10 * timeout) != "survived":
            raise SystemExit("the tests fail without any change")
        threads = [threading.Thread(target=lambda p=place: work(waiting, p, tests, timeout)) for place in copies]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def work(waiting: "queue.SimpleQueue[Mutant]", place: Path, tests: list[str], timeout: float) -> None:
    """Run mutants from the queue until it is empty."""
    for mutant in taken(waiting):
        path = place / mutant.file
        source = path.read_text()
        path.write_text(changed(source, mutant.site))
        try:
            mutant.outcome = outcome(place, tests, timeout)
        finally:
            path.write_text(source)
        print(f"{mutant.outcome} {mutant.file}:{mutant.line} {mutant.change}", file=sys.stderr)


def taken(waiting: "queue.SimpleQueue[Mutant]") -> Iterator[Mutant]:
    """Yield from the queue until it is empty."""
    while True:
        try:
            yield waiting.get_nowait()
        except queue.Empty:
            return


def outcome(place: Path, tests: list[str], timeout: float) -> str:
    """Run the tests of a checkout until the first failure."""
    environment = {**os.environ, "PYTHONPATH": str(place / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "--hypothesis-profile",
        "no-shrink",
        *tests,
    ]
    try:
        done = subprocess.run(command, cwd=place, env=environment, capture_output=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return "timeout"
    return "survived" if done.returncode == 0 else "killed"


if __name__ == "__main__":
    main()
