"""A process that has imported vLLM and nothing of this project, and becomes a server or a script by forking.

    python zygote.py <requests >replies

Most of a server's start is three processes importing the same modules. Here they are imported once. Each line
of standard input is a JSON object and gets one line in reply:

    {"run": [module or script, arguments...], "log": ..., "environment": {...}, "directory": ...}
        -> {"pid": 123}
    {"poll": 123}
        -> {"status": null or the exit code, negative for a signal}

A child is in a session of its own, has the environment given and no other, and runs what it is told to as
``python -m`` would. What differs from a start of its own:
- vLLM's engine core and workers are forked too. (So they are by default on GPUs; on CPUs vLLM spawns them, to
  set up OpenMP, and what they are given is pickled.) They inherit open files, the server's socket among them.
- All share one seed of Python's hash(), which differs from start to start otherwise.
- torch compiles nothing.
Servers that are started plainly are in test_serving.py and, with a restart, in test_examples.py.

A process with threads must not be forked: the zygote ends with an error if it has more than one. It also ends
with its input, and ends its children then.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import json
import os
import runpy
import signal
import sys
import warnings
from pathlib import Path
from typing import Any, TextIO

# What the API server, the engine core and a worker import at a start, as far as it is vLLM's or below it.
MODULES = (
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.executor.multiproc_executor",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.gemma3",
)
OURS = ("kv_offload", "specs")


def preloaded() -> str:
    """The libraries that vLLM loads into its processes on CPU before all others (vllm/platforms/cpu.py)."""
    found = []
    for package, pattern in (("vllm", "libs/libtcmalloc_minimal*.so*"), ("torch", "lib/libgomp*.so*")):
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            root = Path(spec.origin).parent
            libraries = [*root.glob(pattern), *root.parent.glob(f"{package}.libs/{Path(pattern).name}")]
            found += [str(path) for path in libraries[:1]]
    return ":".join(found)


def bind_threads() -> None:
    """In a worker: as many threads as vLLM's environment for OpenMP asks for, and on these CPUs.

    OpenMP itself reads that environment only when it is loaded.
    """
    if cpus := os.environ.get("GOMP_CPU_AFFINITY"):
        import torch

        os.sched_setaffinity(0, {int(cpu) for cpu in cpus.split()})
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def prepare() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in MODULES:
            importlib.import_module(module)
    import setproctitle
    import vllm.envs

    setproctitle.getproctitle()  # finds where the title lies, which it cannot once the environment is another
    vllm.envs.environment_variables["VLLM_WORKER_MULTIPROC_METHOD"] = lambda: "fork"
    os.register_at_fork(after_in_child=bind_threads)
    assert not [name for name in sys.modules if name.split(".")[0] in OURS], "what is tested is loaded later"
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads is not to be forked"
    gc.collect()
    gc.freeze()  # collecting it in a child would copy its pages


def become(request: dict[str, Any]) -> None:
    """In the child: the program of ``request``; ends the process."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for file, targets in ((null, (0,)), (log, (1, 2))):
        for target in targets:
            os.dup2(file, target)
        os.close(file)
    libraries = os.environ["LD_PRELOAD"]
    os.environ.clear()
    os.environ.update(request["environment"], LD_PRELOAD=libraries)
    os.chdir(request["directory"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    program, *_ = sys.argv[:] = request["run"]
    try:
        if program.endswith(".py"):
            sys.path.insert(0, str(Path(program).parent))
            runpy.run_path(program, run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    except SystemExit:
        raise
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        sys.exit(1)


def serve(requests: TextIO, replies: TextIO) -> dict[str, Any] | None:
    """Answers requests until there are no more; in a child it returns what to become."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests, who end us
    print(json.dumps({"ready": os.getpid()}), file=replies, flush=True)
    children = set()
    for line in requests:
        request = json.loads(line)
        if "run" in request:
            pid = os.fork()
            if pid == 0:
                return request  # type: ignore[no-any-return]
            children.add(pid)
            reply = {"pid": pid}
        else:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            children.discard(pid)
            reply = {"status": os.waitstatus_to_exitcode(status) if pid else None}
        print(json.dumps(reply), file=replies, flush=True)
    for pid in children:  # nobody is there any more who would end them
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    return None


def main() -> None:
    if "LD_PRELOAD" not in os.environ:
        # One thread each for what computes here, so that none has others when it forks. Nothing is compiled:
        # vLLM has a helper for log-probabilities compiled at the first request, seconds in each server.
        alone = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
        os.execve(
            sys.executable, [sys.executable, *sys.argv], os.environ | alone | {"LD_PRELOAD": preloaded()}
        )
    # Replies have a file of their own: what is imported may print.
    requests, replies = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    prepare()
    request = serve(requests, replies)
    if request is not None:
        os.close(requests.fileno())
        os.close(replies.fileno())
        become(request)


if __name__ == "__main__":
    main()
