# SPDX-License-Identifier: Apache-2.0
"""Measures the quality of the choice between loading and computing, and its cost to the scheduler thread.

    python benchmarks/decisions.py --program build/decisions

The program (benchmarks/decisions.cc) serves requests in virtual time through the real cache, with tiers of
many speeds and three policies: our choice, always load, never load. The oracle takes the better of the latter
two for each request. Regret is the additional time of our choice over the oracle, including learning. The
cost of a decision is real time and is compared with a 5 ms step.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

from reporting import describe_machine, echo, write_results

STEP_NS = 5_000_000


def summary(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the regret per kind of tier, over all cells and for the worst cell.

    Loading a part of a prompt can beat both policies of the oracle.
    """
    kinds: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for cell in cells:
        kinds[cell["what"]].append(cell)
    return {
        what: {
            "regret": sum(c["ours_s"] for c in of_kind) / sum(c["oracle_s"] for c in of_kind) - 1,
            "mean_cell_regret": sum(c["regret"] for c in of_kind) / len(of_kind),
            "worst": max(of_kind, key=lambda c: c["regret"]),
            "against_never_loading": sum(c["ours_s"] for c in of_kind) / sum(c["compute_s"] for c in of_kind),
            "against_always_loading": sum(c["ours_s"] for c in of_kind) / sum(c["load_s"] for c in of_kind),
        }
        for what, of_kind in kinds.items()
    }


def draw(path: Path, cells: list[dict[str, Any]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    kinds = list(dict.fromkeys(cell["what"] for cell in cells))
    figure, axes = pyplot.subplots(1, len(kinds), figsize=(4.5 * len(kinds), 4), sharey=True)
    for axis, what in zip(axes, kinds, strict=True):
        of_kind = [cell for cell in cells if cell["what"] == what and cell["prompt_tokens"] == 8192]
        speeds = [cell["tier_speed"] for cell in of_kind]
        for name, style in (("load", "--"), ("compute", "--"), ("ours", "-o")):
            axis.plot(speeds, [cell[f"{name}_s"] for cell in of_kind], style, label=name)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_title(what, fontsize=10)
        axis.set_xlabel("speed of the tier (1 = of computing)")
    axes[0].set_ylabel("seconds to the first token, 8,192 tokens")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--program", type=Path, default=Path("build/decisions"))
    options = parser.parse_args()
    echo(describe_machine()["text"])
    output = subprocess.run([options.program], check=True, capture_output=True, text=True).stdout
    rows = [json.loads(line) for line in output.splitlines()]
    cells = [row for row in rows if "what" in row]
    costs = [row | {"share_of_step": row["median_ns"] / STEP_NS} for row in rows if "cost" in row]
    found = summary(cells)
    print(f"\n{'':34} {'regret':>8} {'mean cell':>10} {'worst cell':>11} {'/ never':>9} {'/ always':>9}")
    for what, row in found.items():
        print(
            f"{what:34} {row['regret']:8.2%} {row['mean_cell_regret']:10.2%} {row['worst']['regret']:11.2%} "
            f"{row['against_never_loading']:9.3f} {row['against_always_loading']:9.3f}"
        )
    print()
    for row in costs:
        spent = f"{row['median_ns']:8.0f} ns, {row['share_of_step']:.4%} of a step"
        print(f"{row['cost']:52} {row['chunks']:5} chunks {spent}")
    print(flush=True)
    write_results(
        "decisions", {"summary": found, "cells": cells, "costs": costs}, lambda path: draw(path, cells)
    )


if __name__ == "__main__":
    main()
