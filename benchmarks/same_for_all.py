"""What every server of a comparison is started with, so that only the connector differs."""

from __future__ import annotations

import os
from pathlib import Path

SLEEP_INSTEAD = """\
import os, time

os.sched_yield = lambda: time.sleep(0.0002)
"""


def environment() -> dict[str, str]:
    """For one rank on CPU.

    vLLM keeps one core free for its scheduler, and one more when there is a connector, unless none would be
    left (its ompmultiprocessing.py): of two cores a server with a connector computes on both, one without on
    one. Here all compute on all. The benchmarks' directory is importable, for vllm_tiering_on_cpu, and so is
    what this process can import by PYTHONPATH. Nobody reports its use to anybody.
    """
    importable = [str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", "")]
    return {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
        "PYTHONPATH": os.pathsep.join(filter(None, importable)),
        "DO_NOT_TRACK": "1",
    }


def sleep_where_vllm_spins(directory: Path) -> None:
    """For servers that are started from now on; ``directory`` is empty, and stays as long as they run.

    vLLM's processes spin with sched_yield while they wait for each other. On two cores that leaves none to
    what reads, nor to a store that runs beside them, for seconds at times (docs/troubleshooting.md): whoever
    is compared then is compared by that. This plugin has them sleep while it loads; here they always do, and
    for everybody.
    """
    (directory / "sitecustomize.py").write_text(SLEEP_INSTEAD)
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(directory), before)))
