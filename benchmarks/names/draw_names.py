"""Draw names from the code, for a reader who has not seen it: what does each of them probably do?

    draw_names.py --seed COMMIT [--count 20] [--control PACKAGE_FOLDER] [--control-count 10] [--key FILE]

Prints a numbered list of names with their kind and file, ours and those of the control mixed in a seeded order. With
--key the origin of each number is written to FILE, to be used after the answers. The control is a folder of another
project's Python files, for example vllm/v1/core of an installed vLLM.
"""

import argparse
import ast
import json
from pathlib import Path
from random import Random

OWN = Path(__file__).parents[2] / "src" / "headstart"


def names_in(folder: Path) -> list[tuple[str, str, str]]:
    """Return (name, kind, file) of every public class, function and method defined in a folder, each name once."""
    found: dict[str, tuple[str, str, str]] = {}
    for path in sorted(folder.rglob("*.py")):
        file = str(path.relative_to(folder.parent if folder == OWN else folder.parents[1]))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                add(found, node.name, node.name, "class", file)
                for inner in node.body:
                    if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                        add(found, inner.name, f"{node.name}.{inner.name}", "method", file)
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                add(found, node.name, node.name, "function", file)
    return list(found.values())


def add(found: dict[str, tuple[str, str, str]], own: str, name: str, kind: str, file: str) -> None:
    """Add a name, unless it or its class is private."""
    if not own.startswith("_") and not name.startswith("_"):
        found.setdefault(name, (name, kind, file))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", required=True, help="hash of the commit")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--control", type=Path, help="folder of the control's code")
    parser.add_argument("--control-count", type=int, default=10)
    parser.add_argument("--key", type=Path, help="file for the origin of each number")
    options = parser.parse_args()
    rng = Random(options.seed)
    drawn = [("headstart", *name) for name in rng.sample(names_in(OWN), options.count)]
    if options.control is not None:
        drawn += [("control", *name) for name in rng.sample(names_in(options.control), options.control_count)]
    rng.shuffle(drawn)
    for number, (_, name, kind, file) in enumerate(drawn, 1):
        print(f"{number}. `{name}` ({kind}, {file})")
    if options.key is not None:
        origins = {number: [origin, name] for number, (origin, name, *_) in enumerate(drawn, 1)}
        options.key.write_text(json.dumps(origins, indent=1))


if __name__ == "__main__":
    main()
