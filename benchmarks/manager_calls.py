# SPDX-License-Identifier: Apache-2.0
"""Compares the scheduler thread's time in our calls with vLLM's CPUOffloadingManager, for 4,096 keys.

    python benchmarks/manager_calls.py [--resident 8192 1000000] [--rounds 15] [--eviction-policy prefix]

Both managers run in one process, hold the same number of resident chunks and are full. They get the same
calls in turns: lookup of hits and of misses, prepare_load, complete_load, prepare_store (which evicts as many
chunks) and complete_store. The result is the median of the rounds. Host memory is mapped but not touched.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import statistics
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "python"))

import adapter
from reporting import describe_machine, echo, write_results

adapter.use_specs()

from kv_offload.specs.manager import KVOffloadManager  # noqa: E402
from vllm.v1.kv_offload.base import ReqContext, ScheduleEndContext, make_offload_key  # noqa: E402
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager  # noqa: E402

from kv_offload import _core  # noqa: E402

KEYS = 4096
ROW_BYTES = 4096
CALLS = ("lookup hits", "lookup misses", "prepare_load", "complete_load", "prepare_store", "complete_store")


def make_keys(first: int, count: int = KEYS) -> list[bytes]:
    return [
        bytes(make_offload_key(hashlib.sha256(b"%d" % number).digest(), 0))
        for number in range(first, first + count)
    ]


class Ours:
    """KVOffloadManager on the core. A worker is reduced to its job reports."""

    name = "KVOffloadManager"

    def __init__(self, resident: int, eviction_policy: str) -> None:
        engine = f"benchmark-{uuid.uuid4()}"
        size = resident * ROW_BYTES
        self.worker = _core.HostRegion.attach_worker(engine, size, 1, 1, 0, [ROW_BYTES], "{}")
        self.region = _core.HostRegion.attach_scheduler(engine, size, 1, 1)
        self.region.wait_for_ranks(10)
        metrics = _core.Metrics()
        cache = _core.TieredCache(
            self.region,
            metrics,
            group_ids=[0],
            tokens_per_chunk=[16],
            shard_bytes=[[ROW_BYTES]],
            eviction_policy=eviction_policy,
        )
        self.manager: Any = KVOffloadManager(cache, metrics)

    def copied(self, spec: Any) -> None:
        self.worker.report(0, spec.ticket, 0)

    def end_step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext(new_req_ids=(), preempted_req_ids=()))
        self.manager.get_stats()


class Theirs:
    """vLLM's host memory manager (always LRU)."""

    name = "CPUOffloadingManager"

    def __init__(self, resident: int, eviction_policy: str) -> None:
        self.manager: Any = CPUOffloadingManager(num_chunks=resident)

    def copied(self, spec: Any) -> None:
        pass

    def end_step(self) -> None:
        self.manager.get_stats()


def milliseconds(call: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    result = call()
    return (time.perf_counter() - started) * 1e3, result


class Side:
    """One full manager and the times of its calls."""

    def __init__(self, made: Any, resident: int) -> None:
        self.made, self.manager = made, made.manager
        self.times: dict[str, list[float]] = {call: [] for call in CALLS}
        self.next_key = 0
        self.requests = 0
        for first in range(0, resident, KEYS):
            self._store(min(KEYS, resident - first), self._request())
        self.last = make_keys(self.next_key - KEYS)

    def _request(self) -> ReqContext:
        self.requests += 1
        request = ReqContext(req_id=f"r{self.requests}")
        self.manager.on_new_request(request)
        return request

    def _store(self, count: int, request: ReqContext) -> tuple[list[bytes], float, float]:
        keys = make_keys(self.next_key, count)
        for index, key in enumerate(keys):
            request.set_offload_key_position(key, 16 * (index + 1))
        self.next_key += count
        prepared, output = milliseconds(lambda: self.manager.prepare_store(keys, request))
        assert len(output.keys_to_store) == count
        self.made.copied(output.store_spec)
        done = set(output.keys_to_store)
        completed, _ = milliseconds(lambda: self.manager.complete_store(done, request))
        self.made.end_step()
        self.manager.on_request_finished(request)
        return keys, prepared, completed

    def round(self) -> None:
        """Makes each call once, in the order of a request's life cycle."""
        request, hits, misses = self._request(), self.last, make_keys(1 << 40)
        lookup = self.manager.lookup

        def look(keys: list[bytes]) -> None:
            for key in keys:
                lookup(key, request)

        assert str(lookup(hits[0], request)).endswith(".HIT")
        self._note("lookup hits", milliseconds(lambda: look(hits))[0])
        self._note("lookup misses", milliseconds(lambda: look(misses))[0])
        prepared_load, spec = milliseconds(lambda: self.manager.prepare_load(hits, request))
        self._note("prepare_load", prepared_load)
        self.made.copied(spec)
        loaded = set(hits)
        self._note("complete_load", milliseconds(lambda: self.manager.complete_load(loaded, request))[0])
        self.made.end_step()
        self.last, prepared, completed = self._store(KEYS, request)
        self._note("prepare_store", prepared)
        self._note("complete_store", completed)

    def _note(self, call: str, spent: float) -> None:
        self.times[call].append(spent)


def measure(resident: int, rounds: int, eviction_policy: str) -> dict[str, Any]:
    """Returns the medians of both in milliseconds, and our speedup."""
    sides = []
    for kind in (Ours, Theirs):
        echo(f"filling {kind.name} with {resident:,} chunks")
        sides.append(Side(kind(resident, eviction_policy), resident))
    gc.collect()
    gc.freeze()  # as the engine core does
    for _ in range(rounds + 1):
        for side in sides:
            side.round()
    found: dict[str, Any] = {}
    for call in CALLS:
        ours, theirs = (statistics.median(side.times[call][1:]) for side in sides)
        found[call] = {"ours_ms": ours, "vllm_ms": theirs, "times_faster": theirs / ours}
    return found


def show(resident: int, found: dict[str, Any]) -> None:
    print(f"\n{resident:,} resident chunks, {KEYS:,} keys a call, milliseconds")
    print(f"{'call':16} {Ours.name:>18} {Theirs.name:>22} {'times faster':>14}")
    for call, row in found.items():
        print(f"{call:16} {row['ours_ms']:18.2f} {row['vllm_ms']:22.2f} {row['times_faster']:14.1f}")
    print(flush=True)


def draw(path: Path, results: dict[str, Any]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(results), figsize=(6 * len(results), 4), squeeze=False)
    for axis, (resident, found) in zip(axes[0], results.items(), strict=True):
        places = range(len(found))
        axis.barh(
            [p + 0.2 for p in places], [row["vllm_ms"] for row in found.values()], 0.4, label=Theirs.name
        )
        axis.barh([p - 0.2 for p in places], [row["ours_ms"] for row in found.values()], 0.4, label=Ours.name)
        axis.set_yticks(list(places), list(found))
        axis.set_xlabel(f"ms for {KEYS:,} keys")
        axis.set_title(f"{int(resident):,} resident chunks")
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--resident", type=int, nargs="+", default=[2 * KEYS, 1_000_000])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--eviction-policy", default="prefix", help="ours; prefix is what is configured by default"
    )
    options = parser.parse_args()
    print(describe_machine()["text"])
    name = f"manager_calls-{options.eviction_policy}"
    results: dict[str, Any] = {}
    for resident in options.resident:
        results[str(resident)] = measure(resident, options.rounds, options.eviction_policy)
        show(resident, results[str(resident)])
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        echo("no picture: matplotlib is not installed")
        write_results(name, {"milliseconds": results})
        return
    write_results(name, {"milliseconds": results}, lambda path: draw(path, results))


if __name__ == "__main__":
    main()
