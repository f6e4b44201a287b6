# SPDX-License-Identifier: Apache-2.0
"""Charts of the hit rate over the size of host memory: with matplotlib, or as text."""

from collections.abc import Mapping, Sequence
from pathlib import Path

Curves = Mapping[str, Sequence[tuple[int, float]]]  # by policy: capacity, hit rate from 0 to 1
_BAR = 50  # characters for a hit rate of 100%


def curves(rows: Sequence[Mapping[str, object]]) -> dict[str, list[tuple[int, float]]]:
    """Returns the hit rates of replays by policy, in order of capacity."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        found.setdefault(str(row["policy"]), []).append((int(row["host_blocks"]), float(row["hit_ratio"])))  # type: ignore[call-overload, arg-type]
    return {policy: sorted(points) for policy, points in found.items()}


def draw(drawn: Curves, path: Path, title: str, unit: str) -> bool:
    """Writes the chart to ``path``, whose suffix is its format (.png, .svg). False if matplotlib is not
    installed. ``unit``: of the capacities."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2))
    for (policy, points), style in zip(drawn.items(), _styles(len(drawn)), strict=True):
        axes.plot([size for size, _ in points], [100 * rate for _, rate in points], style, label=policy)
    axes.set(xlabel=f"host memory, {unit}", ylabel="hit rate, %", ylim=(0, 100), title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True


def _styles(number: int) -> list[str]:
    marks = ("o-", "s--", "^-.", "v:", "D-", "P--")
    return [marks[i % len(marks)] for i in range(number)]


def text(drawn: Curves) -> str:
    """Returns a bar for each size and policy."""
    widest = max(map(len, drawn), default=0)
    lines = []
    for size in sorted({size for points in drawn.values() for size, _ in points}):
        lines.append(f"{size:,}")
        for policy, points in drawn.items():
            for _, rate in (point for point in points if point[0] == size):
                lines.append(f"  {policy:{widest}} {'#' * round(_BAR * rate):{_BAR}} {rate:6.1%}")
    return "\n".join(lines)
