"""Faults planted around our worker and manager: an oracle that does not see them is none."""

from typing import Any

import numpy as np


class _Around:
    """A worker that does everything as before but what a subclass changes."""

    def __init__(self, inner: Any, rank: int) -> None:
        self.inner, self.rank = inner, rank
        self.claimed: dict[int, Any] = {}  # job id -> the result that was made up for it
        self.told: list[Any] = []
        self.held: list[tuple[int, Any]] = []  # (step at which to do it after all, what)
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
        """Report a job as done that is not."""
        from kv_offload.specs.compat import TransferResult

        self.inner.region.report(self.rank, ticket, 0)
        self.claimed[job_id] = TransferResult(job_id, True, 1, 0.001)
        self.told.append(self.claimed[job_id])


class WrongRow(_Around):
    """Loads come from the rows of other chunks."""

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        src_spec.rows = np.roll(src_spec.rows, 1)
        return bool(self.inner.submit_load(job_id, src_spec, dst_spec, expedited))


class SkippedLoad(_Around):
    """Loads are reported and never done."""

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        self.claim(job_id, src_spec.ticket)
        return True


class EarlyLoad(_Around):
    """Loads are reported when they are submitted, and done a few steps later."""

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        self.claim(job_id, src_spec.ticket)
        src_spec.ticket = 0
        self.held.append(
            (self.steps + 3, lambda: self.inner.submit_load(job_id, src_spec, dst_spec, expedited))
        )
        return True


class EarlyStore(_Around):
    """Stores are reported when they are submitted, and done when their blocks may be another request's."""

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self.claim(job_id, dst_spec.ticket)
        dst_spec.ticket = 0
        self.held.append((self.steps + 12, lambda: self.inner.submit_store(job_id, src_spec, dst_spec)))
        return True


class _AroundManager:
    """A manager that does everything as before but what a subclass changes."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class StaleRow(_AroundManager):
    """A manager that hands out a row while another chunk is still found there."""

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
    """A manager that takes what vLLM offers of a session that goes on."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        inner._turns_sessions_away = False


class TrustingAfterReset(_AroundManager):
    """A manager that takes all that vLLM offers again after a reset, blocks long reused included."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        inner._may_store = lambda state: True
