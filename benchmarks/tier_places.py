# SPDX-License-Identifier: Apache-2.0
"""Tiers beyond the host as a benchmark's ``--tier`` names them, and servers of its own."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from reporting import say

from kv_offload.tiers.registry import entry_at, kinds

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "python"))

_PREFIX_KEYS = ("key_prefix", "prefix")  # of the kinds that have one


def entry_of(text: str) -> dict[str, Any]:
    """``KIND=PLACE`` or a table of secondary_tiers as JSON, with a prefix that no run before had: what is
    computed first must not be found. SystemExit for a kind that has none."""
    entry: dict[str, Any] = json.loads(text) if text.startswith("{") else entry_at(text)
    kind = kinds().get(entry.get("type", ""))
    keys = [key for key in _PREFIX_KEYS if kind is not None and key in kind.model_fields]
    if not keys:
        raise SystemExit(f"--tier {text} is of no kind beyond the host: give redis=URL, s3=BUCKET or JSON")
    prefix = f"bench-{uuid.uuid4().hex}"
    say(f"records go under the prefix {prefix}: {text}")
    return {**entry, keys[0]: prefix}


@contextlib.contextmanager
def own_redis() -> Iterator[str]:
    """A redis-server on loopback, which all can be pointed at, and its ``--tier``."""
    from redis_server import redis_server
    from s3_server import free_ports

    port = str(free_ports(1)[0])
    options = ["--port", port, "--maxmemory", "2gb", "--maxmemory-policy", "allkeys-lru"]
    with (
        tempfile.TemporaryDirectory() as directory,
        redis_server(Path(directory), "--bind", "127.0.0.1", *options),
    ):
        yield f"redis=redis://127.0.0.1:{port}"


@contextlib.contextmanager
def own_s3(tls: bool = False) -> Iterator[str]:
    """SeaweedFS on loopback, and its ``--tier``; its keys are in the environment from here on."""
    from s3_server import ACCESS, BUCKET, SECRET, S3Server, certificate

    os.environ |= {"AWS_ACCESS_KEY_ID": ACCESS, "AWS_SECRET_ACCESS_KEY": SECRET}
    with tempfile.TemporaryDirectory() as directory:
        own = certificate(Path(directory)) if tls else None
        server = S3Server(Path(directory), own)
        try:
            server.start()
            place = (
                {"endpoint": server.endpoint}
                if own is None
                else {"endpoint": server.secure, "ca_file": str(own)}
            )
            yield json.dumps({"type": "s3", "bucket": BUCKET, **place})
        finally:
            server.kill()


@contextlib.contextmanager
def own_mooncake() -> Iterator[str]:
    """Mooncake's master and a holder of 2 GiB on loopback, and their ``--tier``."""
    from mooncake_store import mooncake_store

    with (
        tempfile.TemporaryDirectory() as directory,
        mooncake_store(Path(directory), holder_bytes=2 << 30) as running,
    ):
        yield f"mooncake={running.address}"


OWN = {"redis": own_redis, "s3": own_s3, "mooncake": own_mooncake}
