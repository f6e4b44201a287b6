# SPDX-License-Identifier: Apache-2.0
"""Faults planted around our worker and manager; the oracle must detect each of them."""

from typing import Any

import numpy as np


class _Around:
    """A worker that forwards everything except the methods that a subclass overrides."""

    def __init__(self, inner: Any, rank: int) -> None:
        self.inner, self.rank = inner, rank
        self.claimed: dict[int, Any] = {}  # job id -> the fabricated result
        self.told: list[Any] = []
        self.held: list[tuple[int, Any]] = []  # (step at which to run it after all, action)
        self.steps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def get_finished(self) -> list[Any]:
        self.steps += 1
        while self.held and self.held[0][0] <= self.steps:
            self.held.pop(0)[1]()
        real = [result for result in self.inner.get_finished() if result.job_id not in self.claimed]
        told, self.told = self.told, []
        return told + real

    def claim(self, job_id: int, ticket: int) -> None:
        """Reports an unfinished job as done."""
        from kv_offload.specs.compat import TransferResult

        self.inner.region.report(self.rank, ticket, 0)
        self.claimed[job_id] = TransferResult(job_id, True, 1, 0.001)
        self.told.append(self.claimed[job_id])


class WrongRow(_Around):
    """Loads from the rows of other chunks."""

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        src_spec.rows = np.roll(src_spec.rows, 1)
        return bool(self.inner.submit_load(job_id, src_spec, dst_spec, expedited))


class SkippedLoad(_Around):
    """Reports loads without doing them."""

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        self.claim(job_id, src_spec.ticket)
        return True


class EarlyLoad(_Around):
    """Reports loads at submission, and does them a few steps later."""

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        self.claim(job_id, src_spec.ticket)
        src_spec.ticket = 0
        self.held.append(
            (self.steps + 3, lambda: self.inner.submit_load(job_id, src_spec, dst_spec, expedited))
        )
        return True


class EarlyStore(_Around):
    """Reports stores at submission, and does them when their blocks may belong to another request."""

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self.claim(job_id, dst_spec.ticket)
        dst_spec.ticket = 0
        self.held.append((self.steps + 12, lambda: self.inner.submit_store(job_id, src_spec, dst_spec)))
        return True


class _AroundManager:
    """A manager that forwards everything except the methods that a subclass overrides."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class StaleRow(_AroundManager):
    """A manager that allocates a row while another chunk is still found there."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.last: int | None = None

    def prepare_store(self, keys: Any, req_context: Any) -> Any:
        output = self.inner.prepare_store(keys, req_context)
        rows = output.store_spec.rows
        if len(rows) and self.last is not None:
            rows = rows.copy()
            rows[0] = self.last
            output.store_spec.rows = rows
        if len(rows):
            self.last = int(rows[-1])
        return output


class TrustingSessions(_AroundManager):
    """A manager that accepts vLLM's offers of a resumed session."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        inner._stops_resumed_sessions = False


class TrustingAfterReset(_AroundManager):
    """A manager that accepts all offers of vLLM after a reset, including blocks that were reused long ago."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        inner._may_store = lambda state: True
