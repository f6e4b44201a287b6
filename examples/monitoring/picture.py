"""Draws the dashboard without Grafana: its own panels and queries, asked of a live Prometheus, as a PNG.

    python picture.py http://127.0.0.1:9090 dashboard.png --minutes 5

For documentation, and to look at a server where no Grafana is. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from dashboard import Panel, panels
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

COLUMNS = 4
BACKGROUND, PAPER, INK, GRID = "#111217", "#181b1f", "#ccccdc", "#2c3235"
COLOURS = ("#73bf69", "#f2cc0c", "#8ab8ff", "#ff780a", "#f2495c", "#b877d9", "#5794f2", "#96d98d")
VARIABLES = {"$job": ".*", "$engine": ".*"}

Series = tuple[str, list[float], list[float]]  # legend, seconds from the start, values


def ask(base: str, expression: str, start: float, end: float, step: float) -> list[dict[str, Any]]:
    """The series of one query over a range. Raises OSError, or ValueError with what Prometheus says."""
    for variable, value in ({"$__rate_interval": f"{max(4 * step, 5):.0f}s"} | VARIABLES).items():
        expression = expression.replace(variable, value)
    asked = urllib.parse.urlencode({"query": expression, "start": start, "end": end, "step": step})
    with urllib.request.urlopen(f"{base}/api/v1/query_range?{asked}", timeout=30) as reply:
        answer = json.load(reply)
    if answer["status"] != "success":
        raise ValueError(f"{expression}: {answer.get('error')}")
    return list(answer["data"]["result"])


def series_of(panel: Panel, base: str, start: float, end: float) -> list[Series]:
    """What a panel shows: one line for each series of its queries."""
    found = []
    for legend, expression in panel.queries.items():
        for row in ask(base, expression, start, end, (end - start) / 120):
            name = legend
            for label, value in row["metric"].items():
                name = name.replace(f"{{{{{label}}}}}", value)
            points = [(at - start, float(value)) for at, value in row["values"]]
            points = [(at, value) for at, value in points if math.isfinite(value)]
            if points:
                found.append((name, [at for at, _ in points], [value for _, value in points]))
    return found


def shown(value: float, unit: str) -> str:
    """A value as Grafana writes it in ``unit``."""
    if unit == "percentunit":
        return f"{100 * value:.0f}%"
    if unit == "s":
        return f"{value:g} s" if value >= 1 or value == 0 else f"{value * 1000:g} ms"
    base, names = (1024, ("", "Ki", "Mi", "Gi", "Ti")) if unit in ("bytes", "Bps") else (1000, ("", "K", "M"))
    step = 0
    while abs(value) >= base and step + 1 < len(names):
        value, step = value / base, step + 1
    suffix = {"bytes": "B", "Bps": "B/s"}.get(unit, "")
    return f"{value:.3g} {names[step]}{suffix}".rstrip()


def draw_panel(axes: Axes, panel: Panel, series: list[Series]) -> None:
    axes.set_facecolor(PAPER)
    axes.set_title(panel.title, color=INK, fontsize=8, loc="left", fontweight="bold")
    for number, (name, seconds, values) in enumerate(series):
        colour = COLOURS[number % len(COLOURS)]
        axes.plot(seconds, values, color=colour, linewidth=1, label=name)
        axes.fill_between(seconds, values, color=colour, alpha=0.15, linewidth=0)
    if series:
        axes.legend(fontsize=5.5, frameon=False, labelcolor=INK, loc="upper left", ncols=2)
    else:
        axes.text(0.5, 0.5, "No data", color="#7b8087", ha="center", transform=axes.transAxes, fontsize=8)
    top = max((max(values) for _, _, values in series), default=0.0)
    axes.set_ylim(0, top * 1.35 if top > 0 else 1)
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: shown(value, panel.unit)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f} s"))
    axes.tick_params(colors=INK, labelsize=6, length=0)
    axes.grid(color=GRID, linewidth=0.5)
    for spine in axes.spines.values():
        spine.set_visible(False)


def draw(base: str, file: Path, start: float, end: float) -> int:
    """Draws all panels; returns how many of them have data."""
    drawn = panels()
    rows = math.ceil(len(drawn) / COLUMNS)
    figure, grid = plt.subplots(rows, COLUMNS, figsize=(14, 2.2 * rows), facecolor=BACKGROUND, squeeze=False)
    with_data = 0
    for axes in grid.flat:
        axes.set_visible(False)
    for axes, panel in zip(grid.flat, drawn, strict=False):
        series = series_of(panel, base, start, end)
        with_data += bool(series)
        axes.set_visible(True)
        axes.set_xlim(0, end - start)
        draw_panel(axes, panel, series)
    figure.tight_layout()
    figure.savefig(file, dpi=90, facecolor=BACKGROUND)
    plt.close(figure)
    return with_data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("prometheus", help="its address: http://127.0.0.1:9090")
    parser.add_argument("file", type=Path)
    parser.add_argument("--minutes", type=float, default=60.0, help="the last so many")
    arguments = parser.parse_args()
    end = time.time()
    count = draw(arguments.prometheus, arguments.file, end - 60 * arguments.minutes, end)
    print(f"{count} of {len(panels())} panels have data; {arguments.file}")


if __name__ == "__main__":
    main()
