# SPDX-License-Identifier: Apache-2.0
"""Imports vLLM, but nothing of this project, and forks: each child becomes a server or a script.

    python zygote.py [modules instead of a server's] <requests >replies

Most of a server's start is three processes that import the same modules; here they are imported once. Each
line of standard input is a JSON object and gets one line in reply:

    {"run": [module or script, arguments...], "log": ..., "environment": {...}, "directory": ...}
      -> {"pid": 123}
    {"poll": 123}
      -> {"status": null or the exit code, negative for a signal}

A child is in a session of its own, has only the given environment, and runs its program as ``python -m``
would. It differs from a separate start in these points:
    - vLLM's engine core and workers are forked too, as on GPUs by default. On CPUs vLLM spawns them to set
      up OpenMP and pickles their arguments. Forks inherit open files, including the server's socket.
    - All share one seed of Python's hash(), which otherwise differs between starts.
    - torch compiles nothing.
    - vLLM inspects model classes in the child itself, not in another process.
The tests that start servers without it are test_serving.py and, with a restart, test_examples.py.

A process with threads must not be forked: the zygote fails if it has more than one thread. It also exits when
its input ends, and then ends its children.
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

# The modules that the API server, the engine core and a worker import at a start, from vLLM and its
# dependencies.
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
    """Returns the libraries that vLLM preloads into its processes on CPU (vllm/platforms/cpu.py)."""
    found = []
    for package, pattern in (("vllm", "libs/libtcmalloc_minimal*.so*"), ("torch", "lib/libgomp*.so*")):
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            root = Path(spec.origin).parent
            libraries = [*root.glob(pattern), *root.parent.glob(f"{package}.libs/{Path(pattern).name}")]
            found += [str(path) for path in libraries[:1]]
    return ":".join(found)


def bind_threads() -> None:
    """Sets a worker's thread count and CPU affinity from vLLM's environment for OpenMP.

    OpenMP itself reads that environment only when it is loaded.
    """
    if cpus := os.environ.get("GOMP_CPU_AFFINITY"):
        import torch

        os.sched_setaffinity(0, {int(cpu) for cpu in cpus.split()})
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def prepare(modules: Sequence[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in modules:
            importlib.import_module(module)
    import setproctitle
    import vllm.envs

    # locates the title's memory, which is impossible after the environment has changed
    setproctitle.getproctitle()
    # To read the properties of a model class, vLLM starts a process that imports vLLM, which takes ten
    # seconds. That keeps CUDA out of the server process and has no use on CPU.
    registry = importlib.import_module("vllm.model_executor.models.registry")
    assert hasattr(registry, "_run_in_subprocess"), "this vLLM inspects model classes elsewhere"
    registry._run_in_subprocess = lambda function: function()  # type: ignore[attr-defined]
    vllm.envs.environment_variables["VLLM_WORKER_MULTIPROC_METHOD"] = lambda: "fork"
    os.register_at_fork(after_in_child=bind_threads)
    assert not [name for name in sys.modules if name.split(".")[0] in OURS], (
        "the project under test is already imported"
    )
    assert len(os.listdir("/proc/self/task")) == 1, "the zygote has threads: it must not be forked"
    gc.collect()
    gc.freeze()  # a collection in a child would copy its pages


def become(request: dict[str, Any]) -> None:
    """Runs the program of ``request`` in the child; ends the process."""
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
    """Answers requests until the input ends; in a child, returns the program to become."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the test process, which ends this one
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
    for pid in children:  # no other process is left to end them
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    return None


def main() -> None:
    if "LD_PRELOAD" not in os.environ:
        # The math libraries get one thread each, so that the zygote has no other threads when it forks.
        # Nothing is compiled: vLLM would compile a helper for log-probabilities at the first request, which
        # takes seconds in each server.
        alone = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
        os.execve(
            sys.executable, [sys.executable, *sys.argv], os.environ | alone | {"LD_PRELOAD": preloaded()}
        )
    # Replies have a file of their own, because imports may print.
    requests, replies = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    prepare(sys.argv[1:] or MODULES)
    request = serve(requests, replies)
    if request is not None:
        os.close(requests.fileno())
        os.close(replies.fileno())
        become(request)


if __name__ == "__main__":
    main()
