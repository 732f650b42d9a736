"""The plot of a comparison: how many times slower than Headstart each peer is, row by row, and the floors."""

from pathlib import Path
from typing import Any

from results import KINDS, OPTIONAL, ratio_key

PEERS = {"vllm": "vLLM", "llamacpp": "llama.cpp", "transformers": "Transformers", OPTIONAL: "OpenVINO"}


def draw(found: dict[str, Any], path: Path) -> None:
    """Draw into an image file, without rows for which Headstart has no figure."""
    from matplotlib.figure import Figure  # takes a second, and only drawing needs it

    keys = [key for key in KINDS if found.get(f"{key}.ours")]
    figure = Figure(figsize=(8, 1 + 0.55 * max(len(keys), 1)), layout="constrained")
    axes = figure.add_subplot()
    ratios = {title: ratio_key(peer) for peer, title in PEERS.items()}
    ratios = {title: label for title, label in ratios.items() if any(f"{key}.{label}" in found for key in KINDS)}
    height = 0.8 / max(len(ratios), 1)
    for number, (title, label) in enumerate(ratios.items()):
        places = [row + (number - (len(ratios) - 1) / 2) * height for row in range(len(keys))]
        values = [found.get(f"{key}.{label}") or 0.0 for key in keys]
        axes.barh(places, [max(value - 1, -0.99) if value else 0.0 for value in values], height, left=1, label=title)
    floors = [_floor(found, key) for key in keys]
    axes.scatter(floors, range(len(keys)), marker="|", s=220, color="black", label="floor", zorder=3)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}")
    axes.set_yticks(range(len(keys)), [key.replace("_", " ") for key in keys])
    axes.invert_yaxis()
    axes.set(xlabel="times slower than Headstart (right of 1: slower)")
    axes.legend()
    figure.savefig(path, dpi=150)


def _floor(found: dict[str, Any], key: str) -> float:
    """Return the floor on the plot's scale: below 1, the factor by which Headstart could still be faster."""
    ours, floor = found[f"{key}.ours"], found[f"{key}.floor"]
    return ours / floor if KINDS[key].is_rate else floor / ours
