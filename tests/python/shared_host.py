# SPDX-License-Identifier: Apache-2.0
"""One of several hosts that share a directory: a cache over it, driven by JSON lines on standard input.

    python shared_host.py ROOT MAX_BYTES

answers each line ``{"do": verb, ...}`` with one line of JSON. Verbs: ``store`` (numbers; {"written": records
that the tier took}), ``find`` (numbers; {"hits": numbers loaded with the right bytes, "wrong": with other
bytes}), ``reset``, ``step`` (seconds) and ``stats``. Log lines of the core are printed to standard error.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from small_core import SHARD_BYTES, attach, key, make_cache

from kv_offload import _core

ROW_UNIT = 4096  # rows are given in pages of an area
MISS, HIT = 0, 1
PATIENCE_SECONDS = 240.0  # for the tier's threads on a slow machine; not a measurement


class Host:
    def __init__(self, root: Path, max_bytes: int, shm: Path) -> None:
        self.region, (self.worker,) = attach(shm, 4 << 20)
        self.metrics = _core.Metrics()
        self.epoch = 0
        tier = _core.FsTier(
            root_dir=str(root),
            max_bytes=max_bytes,
            namespace_id=bytes(range(32)),
            namespace_json='{"model": "small"}',
            op_timeout_seconds=PATIENCE_SECONDS,
        )
        self.cache = make_cache(
            self.region,
            self.metrics,
            tiers=[tier],
            load_policy="always",
            lookup_timeout_seconds=PATIENCE_SECONDS,
        )
        self.requests = 0

    def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        verb = order.pop("do")
        return dict(getattr(self, verb)(**order))

    def store(self, numbers: Sequence[int]) -> dict[str, Any]:
        """Stores one after another, so that host memory has room and the tier takes all that it can."""
        before = self._written()
        for number in numbers:
            request = self._begin()
            accepted, ticket, rows, *_ = self.cache.prepare_store(request, [key(number)])
            for row in rows:
                self._bytes_at(row)[:] = self._content(number)
            self.worker.report(0, ticket, 0)
            self.cache.complete_store(accepted)
            self.cache.end_request(request)
            quiet = iter(range(3))  # the next step counts finished writes
            self._step_until(
                lambda quiet=quiet: (
                    self.cache.tier_stats(0)["queued_writes"] == 0 and next(quiet, None) is None
                )
            )
        return {"written": (self._written() - before) // SHARD_BYTES}

    def find(self, numbers: Sequence[int]) -> dict[str, Any]:
        """Looks up each number as a waiting request does; the stored chunks evict them from host memory."""
        hits, wrong = [], []
        for number in numbers:
            request = self._begin()
            answer = [2]

            def answered(request: int = request, number: int = number, answer: list[int] = answer) -> bool:
                answer[0] = self.cache.lookup(request, key(number))
                return answer[0] in (MISS, HIT)

            self._step_until(answered)
            if answer[0] == HIT:
                ticket, rows, _ = self.cache.prepare_load(request, [key(number)])
                right = all((self._bytes_at(row) == self._content(number)).all() for row in rows)
                (hits if right else wrong).append(number)
                self.worker.report(0, ticket, 0)
                self.cache.complete_load([key(number)])
            self.cache.end_request(request)
        return {"hits": hits, "wrong": wrong}

    def reset(self) -> dict[str, Any]:
        """Resets as after a weight update: chunks stored from now on have other bytes."""
        self.cache.reset()
        self.epoch += 1
        self._step_until(lambda: bool(self.cache.tier_stats(0)["writable"]))
        return {}

    def step(self, seconds: float) -> dict[str, Any]:
        ends = time.monotonic() + seconds
        self._step_until(lambda: time.monotonic() > ends)
        return {}

    def stats(self) -> dict[str, Any]:
        failures = [
            (labels, value)
            for name, _, labels, value in self.metrics.drain()
            if name in ("kv_offload_failures_total", "kv_offload_dropped_bytes_total")
        ]
        return {"tier": self.cache.tier_stats(0), "failures": failures}

    def _begin(self) -> int:
        self.requests += 1
        return int(self.cache.begin_request(f"r{self.requests}"))

    def _content(self, number: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return np.random.default_rng((number, self.epoch)).integers(0, 256, SHARD_BYTES, np.uint8)

    def _bytes_at(self, row: Any) -> Any:
        at = int(row) * ROW_UNIT
        return self.region.area(0)[at : at + SHARD_BYTES]

    def _written(self) -> int:
        return int(self.metrics.value("kv_offload_write_bytes_total", ["fs"]))

    def _step_until(self, done: Any) -> None:
        pause = threading.Event()
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            self.cache.end_step()
            if done():
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"not done after {PATIENCE_SECONDS} s: {self.cache.tier_stats(0)}")
            pause.wait(0.001)


def main() -> None:
    root, max_bytes = sys.argv[1:]
    with tempfile.TemporaryDirectory() as shm:
        host = Host(Path(root), int(max_bytes), Path(shm))
        print(json.dumps({"ready": True}), flush=True)
        for line in sys.stdin:
            print(json.dumps(host.obey(json.loads(line))), flush=True)
        host.cache.close()


if __name__ == "__main__":
    main()
