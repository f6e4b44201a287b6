# SPDX-License-Identifier: Apache-2.0
"""A running server, as a command is given it: its address, and its metrics page."""

from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

from kv_offload.cli.terminal import PROBLEM, fail

if TYPE_CHECKING:
    from kv_offload.exposition import Page

PREFIX = "kv_offload_"


def metrics_url(given: str) -> str:
    """The page that ``given`` means: http:// and /metrics may be left out. Raises ValueError."""
    parts = urlsplit(given if "://" in given else f"http://{given}")
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError(f"{given} is not a server address; give one such as http://127.0.0.1:8000/metrics")
    return urlunsplit(parts._replace(path=parts.path if parts.path.strip("/") else "/metrics"))


def scrape(address: str) -> "Page":
    """The page at ``address``. Raises OSError; ends the command when it is of another server."""
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
