"""Headstart beside its peers over the size of the model: a table, and a plot of the ratios.

    python benchmarks/peers/sizes.py 0.135=results-smollm2 0.6=results-0.6b --blocks 4.0=speed.json --output sizes

A number is a model's size in billions of weights. Folders are outputs of `run.py`; files after `--blocks` those of
benchmarks/quantized/speed.py, with weights of 4 bits. Writes OUTPUT.md and OUTPUT.png; measures nothing.
"""

import argparse
import json
from pathlib import Path
from typing import Any

ROWS = {"single_stream": "time per token", "cold_ttft": "first token, new prompt", "warm_ttft": "first token, cached"}
RATIOS = {"ratio": "vLLM", "ratio_llamacpp": "llama.cpp", "ratio_openvino": "OpenVINO"}
KEYS = {"token": "time per token", "prefill": "first token, new prompt"}
Point = tuple[float, float]  # billions of weights; how many times faster Headstart is


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=_named, metavar="SIZE=FOLDER")
    parser.add_argument("--blocks", nargs="*", type=_named, default=[], metavar="SIZE=FILE")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("sizes"))
    asked = parser.parse_args()
    lines, curves = (
        ["| weights | figure | Headstart | peer | faster [95 %] |", "|---|---|---|---|---|"],
        dict[str, list[Point]](),
    )
    for size, folder in sorted(asked.folders):
        found = json.loads((folder / "peers.json").read_text(encoding="utf-8"))
        for row, title in ROWS.items():
            for label, peer in RATIOS.items():
                if (ratio := found.get(f"{row}.{label}")) is not None:
                    theirs = found[f"{row}.{peer.replace('.', '').lower()}"]
                    cell = f"{ratio:.2f}{_interval(found.get(f'{row}.{label}.interval'))}"
                    lines.append(_line(f"{size:g}B, bf16", title, found[f"{row}.ours"], peer, theirs, cell))
                    curves.setdefault(f"{title}, {peer}, bf16", []).append((size, ratio))
    for size, file in sorted(asked.blocks):
        engines = json.loads(file.read_text(encoding="utf-8").splitlines()[-1])["engines"]
        for peer in (name for name in engines if name != "headstart"):
            for key, title in KEYS.items():
                ours, theirs = engines["headstart"]["median"][key], engines[peer]["median"][key]
                lines.append(_line(f"{size:g}B, 4 bits", title, ours, peer, theirs, f"{theirs / ours:.2f}"))
                curves.setdefault(f"{title}, {peer}, 4 bits", []).append((size, theirs / ours))
    asked.output.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    draw(curves, asked.output.with_suffix(".png"))
    print("\n".join(lines))


def draw(curves: dict[str, list[Point]], path: Path) -> None:
    """Draw a line per figure and peer into an image file."""
    from matplotlib import colormaps  # takes a second, and only drawing needs it
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot()
    axes.set_prop_cycle(color=colormaps["tab20"].colors[::2] + colormaps["tab20"].colors[1::2])
    for label, points in curves.items():
        axes.plot(*zip(*points, strict=True), marker="o", linestyle="--" if "4 bits" in label else "-", label=label)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    sizes = sorted({size for points in curves.values() for size, _ in points})
    axes.set_xticks(sizes, [f"{size:g}" for size in sizes])
    axes.minorticks_off()
    axes.set(xlabel="weights, billions", ylabel="times faster than the peer")
    axes.legend(bbox_to_anchor=(1.02, 1), loc="upper left", fontsize="small")
    figure.savefig(path, dpi=150)


def _named(text: str) -> tuple[float, Path]:
    size, _, path = text.partition("=")
    return float(size), Path(path)


def _line(model: str, title: str, ours: float, peer: str, theirs: float, ratio: str) -> str:
    return f"| {model} | {title} | {_ms(ours)} | {peer} {_ms(theirs)} | {ratio} |"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f} ms" if seconds >= 0.1 else f"{1e3 * seconds:.3g} ms"


def _interval(bounds: Any) -> str:
    return "" if bounds is None else f" [{bounds[0]:.2f}-{bounds[1]:.2f}]"


if __name__ == "__main__":
    main()
