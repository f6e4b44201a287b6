# SPDX-License-Identifier: Apache-2.0
"""The address and the metrics page of a running server given on the command line."""

from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

from kv_offload.cli.terminal import PROBLEM, fail

if TYPE_CHECKING:
    from kv_offload.exposition import Page

PREFIX = "kv_offload_"


def metrics_url(given: str) -> str:
    """Returns the URL of the metrics page; http:// and /metrics may be omitted. Raises ValueError."""
    parts = urlsplit(given if "://" in given else f"http://{given}")
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError(f"{given} is not a server address; give one such as http://127.0.0.1:8000/metrics")
    return urlunsplit(parts._replace(path=parts.path if parts.path.strip("/") else "/metrics"))


def scrape(address: str) -> "Page":
    """Returns the page at ``address``. Raises OSError; ends the command if the page has none of our
    metrics."""
    from kv_offload.exposition import Page, fetch

    text = fetch(address)
    try:
        page = Page(text)
    except ValueError as error:
        fail(f"{address} is not a metrics page ({error}): give the server's address", PROBLEM)
    if not page.has(PREFIX):
        fail(
            f"{address} has no {PREFIX}* metrics: serve vLLM with spec_name KVOffloadSpec in "
            "--kv-transfer-config (kv-offload config writes it)",
            PROBLEM,
        )
    return page
