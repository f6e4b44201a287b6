# SPDX-License-Identifier: Apache-2.0
"""The pictures of README and documentation, drawn from benchmarks/results.

    python benchmarks/figures.py [--check]

Nothing is measured here. All of them look alike. Their colours are those of Okabe and Ito, which differ for
colour-blind readers too; hatches, marks and the value at each bar make the pictures readable in grey. --check
draws nothing and ends with 1 if a picture is missing or was drawn from other results (each picture carries a
digest of what it was drawn from).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
FIGURES = HERE.parent / "docs" / "figures"
KEY = "Description"  # of a PNG's texts: the digest
STYLES = ({"color": "#999999"}, {"color": "#0072B2"}, {"color": "#E69F00", "hatch": "//"})
LINES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000", "#999999")
NONE, OURS, VLLM = range(3)
NAMES = ("computed, no connector", "vllm-kv-offload", "vLLM's tiering")


def results(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text())  # type: ignore[no-any-return]


def bars(axes: Any, rows: Sequence[tuple[str, float, int]], text: Callable[[float], str]) -> None:
    """One horizontal bar a row, from the top: its label, its value, its style."""
    for row, (_, value, style) in enumerate(rows):
        axes.barh(row, value, height=0.7, edgecolor="black", linewidth=0.8, **STYLES[style])
        axes.text(value, row, f" {text(value)}", va="center")
    axes.set_yticks(range(len(rows)), [label for label, _, _ in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.margins(x=0.18)
    axes.spines[["top", "right"]].set_visible(False)


def reload(figure: Any, found: dict[str, Any]) -> None:
    seconds, ratios = found["seconds"], found["ratio_to_recompute"]
    computed = sum(seconds["none"]["compute"]) / len(seconds["none"]["compute"])
    rows = [("computed", computed, NONE)]
    for name, style in (("kv_offload", OURS), ("vllm", VLLM)):
        for place, label in (("host", "host memory"), ("disk", "disk, after a restart")):
            rows.append((f"{NAMES[style]}: {label}", computed / ratios[name][place], style))
    axes = figure.subplots()
    bars(axes, rows, lambda value: f"{value:.2f} s, {computed / value:.0f}x")
    axes.set_xlabel("seconds to the first token")
    axes.set_title(f"A prompt of {found['tokens']:,} tokens ({found['machine']['cpu']}, no GPU)", fontsize=11)


def conversations(figure: Any, found: dict[str, Any]) -> None:
    systems = list(found["results"])
    for axes, loop in zip(figure.subplots(1, 2, sharey=True), ("chat", "agent"), strict=True):
        rows = []
        for system in systems:
            name, _, size = system.partition(" ")
            style = {"none": NONE, "kv_offload": OURS, "vllm": VLLM}[name]
            label = NAMES[style] + (f", {size}" if size else "")
            rows.append((label, found["results"][system][loop]["median"]["first_token_90%"], style))
        bars(axes, rows, lambda value: f"{value:.2f}")
        axes.set_xlabel("seconds to the first token, 90th percentile")
        axes.set_title(f"{loop.capitalize()}s ({found['machine']['cpu']}, no GPU)", fontsize=11)


def policies(figure: Any, found: dict[str, Any]) -> None:
    axes = figure.subplots()
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in found["host"]:
        lines.setdefault(row["policy"], []).append((row["host_blocks"], 100 * row["hit_ratio"]))
    for (policy, points), mark, dash, color in zip(
        lines.items(), "os^vDPX*", ("-", "--", "-.", ":", "-", "--", "-.", ":"), LINES, strict=False
    ):
        axes.plot(
            *zip(*sorted(points), strict=True),
            marker=mark,
            linestyle=dash,
            color=color,
            markerfacecolor="white",
            label=policy,
        )
    axes.set_xscale("log")
    axes.set_xticks([blocks for blocks, _ in points], [f"{blocks:,}" for blocks, _ in points], fontsize=9)
    axes.minorticks_off()
    axes.set_xlabel("capacity of host memory, blocks")
    axes.set_ylabel("% of blocks hit")
    axes.set_title(f"{found['requests']:,} recorded requests, by policy", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)


# Name, results, size in inches, what draws it.
PICTURES: tuple[tuple[str, str, tuple[float, float], Callable[[Any, dict[str, Any]], None]], ...] = (
    ("reload", "prompt_reload-amd-epyc-2core.json", (8, 3.2), reload),
    ("conversations", "multi_turn-amd-epyc-2core.json", (11, 3.8), conversations),
    ("policies", "trace_replay-conversation_trace-amd-epyc-2core.json", (8, 4), policies),
)


def digest(name: str) -> str:
    """Of the results and of this file: both decide what a picture shows."""
    return hashlib.sha256((RESULTS / name).read_bytes() + Path(__file__).read_bytes()).hexdigest()


def drawn_from(path: Path) -> str:
    """The digest that a picture carries; empty when there is none."""
    from PIL import Image

    if not path.exists():
        return ""
    with Image.open(path) as image:
        return str(image.info.get(KEY, ""))


def stale() -> list[str]:
    """Names of the pictures that are not what would be drawn now."""
    return [name for name, source, _, _ in PICTURES if drawn_from(FIGURES / f"{name}.png") != digest(source)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    if parser.parse_args().check:
        for name in stale():
            print(f"{name}.png is not drawn from the results that are there: python benchmarks/figures.py")
        return 1 if stale() else 0
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    FIGURES.mkdir(exist_ok=True)
    for name, source, size, draw in PICTURES:
        figure = plt.figure(figsize=size, layout="constrained")
        draw(figure, results(source))
        path = FIGURES / f"{name}.png"
        figure.savefig(path, dpi=110, metadata={KEY: digest(source), "Software": None})
        print(f"drawn: {path.relative_to(HERE.parent)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
