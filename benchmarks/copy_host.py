# SPDX-License-Identifier: Apache-2.0
"""Compares the speed of the host copier to memcpy with the same threads.

Baseline: plain memcpy of the same segments with as many threads. Rounds alternate in the same run, and
medians are compared. Baseline of the canonical layout: the same copier on the same pages in the plain layout.

    python benchmarks/copy_host.py --program build/copy_host
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

from reporting import describe_machine, echo, write_results


def baseline_of(row: dict[str, Any]) -> str:
    return "memcpy" if "memcpy" in row else "plain_layout"


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(9, 4.5))
    labels = [f"{row['case']}, {row['direction']}" for row in rows]
    places = range(len(rows))
    axis.barh([p + 0.2 for p in places], [row["ours"] / 1e9 for row in rows], 0.4, label="kv_offload")
    baseline = [row[baseline_of(row)] / 1e9 for row in rows]
    axis.barh([p - 0.2 for p in places], baseline, 0.4, label="memcpy; of canonical: the plain layout")
    axis.set_yticks(list(places), labels, fontsize=7)
    axis.set_xlabel("GB/s")
    axis.invert_yaxis()
    axis.legend()
    axis.set_title(f"{describe_machine()['text']}, {rows[0]['threads']} threads", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--program", type=Path, required=True, help="the built copy_host")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--mebibytes", type=int, default=512, help="bytes per job")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    echo(describe_machine()["text"])
    command = [options.program, options.threads, options.mebibytes, options.rounds]
    rows: list[dict[str, Any]] = []
    with subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        for line in program.stdout:
            row = json.loads(line)
            rows.append(row)
            echo(
                f"{row['case']:45} {row['direction']:5} {row['ours'] / 1e9:6.2f} GB/s, "
                f"{baseline_of(row)} {row[baseline_of(row)] / 1e9:6.2f}, ratio {row['ratio']:.2f}, "
                + (f"by processor time {row['cpu_ratio']:.2f}, " if row["cpu_ratio"] else "")
                + f"plan of {row['segments']} segments {row['plan_seconds'] * 1e3:.2f} ms"
            )
    if program.returncode != 0:
        raise SystemExit(program.returncode)
    write_results("copy_host", {"rows": rows}, lambda path: draw(rows, path))


if __name__ == "__main__":
    main()
