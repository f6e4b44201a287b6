# SPDX-License-Identifier: Apache-2.0
"""Compares copy bandwidth to the link, for every cache layout of vLLM, and measures the cost to a model.

Baselines, in the same run: the link (one big cudaMemcpyAsync in each direction, and in both at once), each
path alone, and the copies of the installed vLLM: its batched call, and its Triton kernel for small pages, as
its worker would choose. Without a vLLM with CUDA, that column is missing and a line says so. Copies are
polled until they end, as a serving engine does; "waited" is our rate for a caller that blocks until then.
"decode" runs steps of a model (small copies in both directions around kernels that fill every SM), alone and
during copies that last for the whole loop, by the limit of copies in flight. A row that misses its target
says so.

Results are written after each question, into a file named ``...-incomplete`` until the last one. An
interrupted benchmark therefore keeps its own results so far and those of an earlier run.

    bash benchmarks/gpu/run.sh                        # builds, tests and measures
    bash benchmarks/gpu/run.sh --fake-cuda            # runs all of it without a GPU
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from reporting import echo, write_results
from vllm_copy import VllmCopies

QUESTIONS = ("decode", "one_way", "layer_major", "both_ways", "submit")
# The settings of "decode" that are used for serving.
SERVING = {
    "ours": "as it serves",
    "dma": "4 MiB, 2 in flight",
    "kernel": "2 MiB, 2 in flight",
    "staged": "2 MiB, 2 in flight",
}


COLUMNS = ("ours", "waited", "dma", "kernel", "staged", "vllm", "vllm_dma", "link")


def aim(row: dict[str, Any]) -> tuple[str, bool] | None:
    """Returns (the row's target, True if the row meets it); None if the row has no target."""
    question = row["question"]
    if question == "one_way" and row["page_bytes"] == 2 << 20:
        return ">= 0.95 of the link", row["ratio"] >= 0.95
    if question == "one_way":
        return "> one descriptor per page", row["ours"] >= 0.98 * row["dma"]
    if question == "both_ways":
        return ">= 0.95 of the link", row["ratio"] >= 0.95
    if question == "layer_major" and row["page_bytes"] == 16 << 10 and row["run"] == 1:
        # Stores without a waiting caller do not use the fastest way to copy.
        rate = row["waited"] if row["direction"] == "store" else row["ours"]
        return ">= 0.85 of the link", rate >= 0.85 * row["link"]
    if question == "decode" and row["setting"] == SERVING[row["path"]]:
        gentle = row["path"] == "dma" or (row["path"] == "ours" and row["direction"] == "store")
        most = 0.03 if gentle else 0.08
        return f"slowed <= {most:.0%}", row["slowed"] <= most
    if question == "submit" and row["segments"] == 1:
        return "< 20 us", row["seconds"] < 20e-6
    return None


def line(row: dict[str, Any]) -> str:
    question = row["question"]
    if question in ("one_way", "layer_major"):
        size = f"{row['page_bytes'] >> 10} KiB x {row['layers']}"
        order = "in order" if row["run"] == 0 else f"runs of {row['run']}"
        rates = ", ".join(f"{name} {row[name] / 1e9:.1f}" for name in COLUMNS if name in row)
        return (
            f"{question:11} {row['direction']:5} {size:14} {order:10} GB/s: {rates}; ratio {row['ratio']:.2f}"
        )
    if question == "both_ways":
        return (
            f"both_ways   {row['stores']} blocks out, {row['loads']} in: {row['ours'] / 1e9:.1f} GB/s, "
            f"waited {row['waited'] / 1e9:.1f}, link {row['link'] / 1e9:.1f}; ratio {row['ratio']:.2f}"
        )
    if question == "decode":
        return (
            f"decode      {row['direction']:5} {row['path']:6} {row['setting']:38}: "
            f"step slowed {row['slowed']:.1%}, "
            f"its small copies {row['copies_alone'] * 1e6:.0f} -> {row['copies_beside'] * 1e6:.0f} us "
            f"(p99 {row['copies_beside_p99'] * 1e6:.0f}), beside {row['rate'] / 1e9:.1f} GB/s"
        )
    return f"submit      {row['segments']} segments: {row['seconds'] * 1e6:.1f} us"


def draw(rows: list[dict[str, Any]], device: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.5), sharey=True)
    for axis, question in zip(axes, ("one_way", "layer_major"), strict=True):
        chosen = [r for r in rows if r["question"] == question and r["direction"] == "load" and r["run"] == 1]
        sizes = [row["page_bytes"] / 1024 for row in chosen]
        for name in COLUMNS:
            if not all(name in row for row in chosen):
                continue
            style = "k--" if name == "link" else "o-"
            axis.plot(sizes, [row[name] / 1e9 for row in chosen], style, label=name)
        axis.set(title=f"{question}, loads, blocks shuffled", xlabel="page, KiB", xscale="log")
        axis.grid(alpha=0.3)
    axes[0].set(ylabel="GB/s", ylim=(0, None))
    axes[1].legend()
    figure.suptitle(device, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--program", type=Path, required=True, help="the built copy_gpu")
    parser.add_argument("--quick", action="store_true", help="small and once: does it run?")
    parser.add_argument("questions", nargs="*", choices=[*QUESTIONS, []], help="default: all")
    options = parser.parse_args()
    if not options.program.exists():
        print(
            f"{options.program} is not there: it is built where nvcc is (KV_OFFLOAD_CUDA=ON)", file=sys.stderr
        )
        return 2
    command = [str(options.program), *options.questions]
    command += ["--quick"] if options.quick else []
    rows: list[dict[str, Any]] = []
    header: dict[str, Any] = {}
    missed = 0

    def keep(*, complete: bool) -> None:
        if options.quick or not rows:
            return
        name = "copy_gpu-" + "-".join(header["device"].lower().split())
        results = {**header, "complete": complete, "rows": rows}
        partly = write_results(f"{name}-incomplete", results)
        if complete:
            write_results(name, results, lambda path: draw(rows, header["device"], path))
            partly.unlink()

    # Create it before the program starts, so that a size that does not fit fails at once. Measure it after
    # the program, because both use the link.
    vllm = VllmCopies() if not options.quick else None
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        for text in program.stdout:
            row = json.loads(text)
            if "device" in row:
                header = row
                echo(f"{row['device']}; {row['table']}")
                continue
            if rows and rows[-1]["question"] != row["question"]:
                keep(complete=False)
            rows.append(row)
            goal = aim(row)
            verdict = "" if goal is None or options.quick else f"  [{goal[0]}: {'yes' if goal[1] else 'NO'}]"
            missed += verdict.endswith("NO]")
            echo(line(row) + verdict)
    keep(complete=False)
    if program.returncode != 0:
        return program.returncode
    if vllm is None:
        echo("tried only: nothing is kept")
        return 0
    if vllm.missing:
        echo(f"vLLM's own copies were not measured: {vllm.missing}")
    else:
        for row in rows:
            if row["question"] in ("one_way", "layer_major"):
                row.update(vllm.rates(row))
                echo(f"vllm        {line(row)}; ours / vllm {row['ours'] / row['vllm']:.2f}")
    header["vllm"] = vllm.missing or vllm.version
    echo(f"{missed} of {len(rows)} rows miss their aim")
    keep(complete=not options.questions)
    return 0


if __name__ == "__main__":
    sys.exit(main())
