# SPDX-License-Identifier: Apache-2.0
"""The bounds of lossy records (``compress`` "lossy:E" or "lossy:KEYS:VALUES"), and totals of the losses that
their headers state."""

import json
import math
from typing import Any, NamedTuple


class ErrorBounds(NamedTuple):
    """Largest relative errors of 64 neighbouring elements.

    If the layout is unknown, the keys' bound applies to all elements.
    """

    keys: float
    values: float  # at least keys

    def text(self) -> str:
        """Returns "0.05", or "0.05 (keys) and 0.1 (values)"."""
        if self.keys == self.values:
            return f"{self.keys:g}"
        return f"{self.keys:g} (keys) and {self.values:g} (values)"


class StatedLoss(NamedTuple):
    """The sizes and losses in the header of a record. Sizes in bytes; errors are relative."""

    is_lossy: bool
    raw_bytes: int
    stored_bytes: int
    keys: float  # largest of 64 neighbouring elements with a key, or of any 64 if the layout is unknown
    rms: float  # of the whole payload
    values: float  # largest of 64 neighbouring values


class LossTotals:
    """Sums of records by whether they are lossy."""

    def __init__(self) -> None:
        self._lossy = self._exact = self._raw = self._stored = 0
        self._keys = self._values = self._squares = 0.0

    def add(self, stated: tuple[bool, int, int, float, float, float] | None) -> None:
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
        self._keys = max(self._keys, loss.keys)
        self._values = max(self._values, loss.values)
        self._squares += loss.raw_bytes * loss.rms**2

    def totals(self) -> dict[str, Any]:
        """Returns {lossy_records, exact_records, ratio, largest_error, largest_key_error,
        largest_value_error, rms_error}.

        ratio: raw bytes over stored bytes of the lossy records. largest_error: the larger one of the errors
        of keys and values. The ratio and the errors are None without lossy records.
        """
        return {
            "lossy_records": self._lossy,
            "exact_records": self._exact,
            "ratio": self._raw / self._stored if self._lossy else None,
            "largest_error": max(self._keys, self._values) if self._lossy else None,
            "largest_key_error": self._keys if self._lossy else None,
            "largest_value_error": self._values if self._lossy else None,
            "rms_error": math.sqrt(self._squares / self._raw) if self._lossy else None,
        }


def allows_loss(description: str) -> bool:
    """Returns whether the namespace that this namespace.json describes may have lossy records."""
    try:
        settings = json.loads(description).get("settings", {})
    except (ValueError, AttributeError):
        return False
    return isinstance(settings, dict) and "max_error" in settings


def largest_errors_text(keys: float, values: float) -> str:
    """Returns "0.0500", or "0.0500 keys, 0.0900 values". ``values``: 0.0 if the layout is unknown."""
    return f"{keys:.4f} keys, {values:.4f} values" if values else f"{keys:.4f}"


def text_of(totals: dict[str, Any]) -> str:
    """Returns the totals as one line."""
    exact = f"{totals['exact_records']:,} exact"
    if not totals["lossy_records"]:
        return f"no lossy records, {exact}"
    largest = largest_errors_text(totals["largest_key_error"], totals["largest_value_error"])
    return (
        f"{totals['lossy_records']:,} lossy, {exact}; the lossy ones are {totals['ratio']:.2f} times smaller "
        f"with a relative error of {totals['rms_error']:.4f} (largest of 64 elements: {largest})"
    )
