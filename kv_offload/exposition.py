# SPDX-License-Identifier: Apache-2.0
"""Reads a server's /metrics page and looks up values by name and label. prometheus_client parses it."""

import math
import time
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from typing import TYPE_CHECKING
from urllib.error import HTTPError, URLError

from kv_offload.printable import printable

if TYPE_CHECKING:
    from prometheus_client.samples import Sample


MOST_PAGE_BYTES = 64 << 20  # a vLLM server with many engines has some MiB
_STEP_BYTES = 1 << 16


def fetch(
    url: str, timeout: float = 10.0, within: float = 60.0, clock: Callable[[], float] = time.monotonic
) -> str:
    """Returns the page at ``url``. ``timeout``: seconds for each wait; ``within``: seconds in total.

    Raises OSError naming the address and what to check.
    """
    until = clock() + within
    try:
        with urllib.request.urlopen(url, timeout=timeout) as reply:
            page = bytearray()
            while part := reply.read1(_STEP_BYTES):
                page += part
                if len(page) > MOST_PAGE_BYTES:
                    raise OSError(f"the reply is longer than {MOST_PAGE_BYTES >> 20} MiB")
                if clock() > until:
                    raise OSError(f"the reply takes longer than {within:g} s")
            if reply.length:
                raise OSError("the reply ended early")
            return page.decode("utf-8", errors="replace")
    except HTTPError as error:
        error.close()
        raise OSError(
            f"{url} returned {error.code} {error.reason}: give the server's address, or its metrics page"
        ) from error
    except (URLError, OSError, HTTPException) as error:  # HTTPException: the peer does not speak HTTP
        reason = getattr(error, "reason", error)
        what = getattr(reason, "strerror", None) or str(reason).strip() or type(reason).__name__
        raise OSError(
            f"{url} cannot be reached ({what}): is the server running there, and are host and port right? "
            "vLLM opens its port only when it has loaded the model"
        ) from error


class Page:
    """One scrape. Series of several engines and models are combined. Labels are made printable, because any
    server can write them."""

    def __init__(self, text: str) -> None:
        """Raises ValueError if ``text`` is not in the Prometheus format."""
        from prometheus_client.parser import text_string_to_metric_families

        self._by_name: dict[str, list[Sample]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if not math.isnan(sample.value):
                    labels = {name: printable(value) for name, value in sample.labels.items()}
                    self._by_name.setdefault(sample.name, []).append(sample._replace(labels=labels))

    def has(self, prefix: str) -> bool:
        return any(name.startswith(prefix) for name in self._by_name)

    def sum(self, name: str, **labels: str) -> float:
        """Returns the sum over all series with ``labels``; 0 if there are none."""
        return sum(sample.value for sample in self._matching(name, labels))

    def max(self, name: str, **labels: str) -> float:
        return max((sample.value for sample in self._matching(name, labels)), default=0.0)

    def min(self, name: str, **labels: str) -> float:
        return min((sample.value for sample in self._matching(name, labels)), default=0.0)

    def values_of(self, name: str, label: str) -> list[str]:
        """Returns the distinct values of ``label`` in the series of ``name``, in their order."""
        return list(dict.fromkeys(sample.labels.get(label, "") for sample in self._by_name.get(name, ())))

    def labels(self, name: str) -> list[dict[str, str]]:
        return [sample.labels for sample in self._by_name.get(name, ())]

    def _matching(self, name: str, labels: dict[str, str]) -> "list[Sample]":
        return [
            sample
            for sample in self._by_name.get(name, ())
            if all(sample.labels.get(label) == value for label, value in labels.items())
        ]
