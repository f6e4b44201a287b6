# SPDX-License-Identifier: Apache-2.0
"""Totals of the losses that the headers of records state (``compress`` "lossy:E")."""

import json
import math
from typing import Any, NamedTuple


class StatedLoss(NamedTuple):
    """What a record's header says about its payload. Sizes in bytes; errors are relative."""

    is_lossy: bool
    raw_bytes: int
    stored_bytes: int
    largest: float  # of any 64 neighbouring elements
    rms: float  # of the whole payload


class LossTotals:
    """Sums of records by whether they are lossy."""

    def __init__(self) -> None:
        self._lossy = self._exact = self._raw = self._stored = 0
        self._largest = self._squares = 0.0

    def add(self, stated: tuple[bool, int, int, float, float] | None) -> None:
        """Adds a record; None, its header is unreadable: does not count."""
        if stated is None:
            return
        loss = StatedLoss(*stated)
        if not loss.is_lossy:
            self._exact += 1
            return
        self._lossy += 1
        self._raw += loss.raw_bytes
        self._stored += loss.stored_bytes
        self._largest = max(self._largest, loss.largest)
        self._squares += loss.raw_bytes * loss.rms**2

    def totals(self) -> dict[str, Any]:
        """Returns {lossy_records, exact_records, ratio, largest_error, rms_error}.

        ratio: raw bytes over stored bytes of the lossy records. It and the errors are None without any.
        """
        return {
            "lossy_records": self._lossy,
            "exact_records": self._exact,
            "ratio": self._raw / self._stored if self._lossy else None,
            "largest_error": self._largest if self._lossy else None,
            "rms_error": math.sqrt(self._squares / self._raw) if self._lossy else None,
        }


def allows_loss(description: str) -> bool:
    """Returns whether the namespace that this namespace.json describes may have lossy records."""
    try:
        settings = json.loads(description).get("settings", {})
    except (ValueError, AttributeError):
        return False
    return isinstance(settings, dict) and "max_error" in settings


def text_of(totals: dict[str, Any]) -> str:
    """Returns the totals as one line."""
    exact = f"{totals['exact_records']:,} exact"
    if not totals["lossy_records"]:
        return f"no lossy records, {exact}"
    return (
        f"{totals['lossy_records']:,} lossy, {exact}; the lossy ones are {totals['ratio']:.2f} times smaller "
        f"with a relative error of {totals['rms_error']:.4f} (of 64 elements at most "
        f"{totals['largest_error']:.4f})"
    )
