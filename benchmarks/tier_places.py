# SPDX-License-Identifier: Apache-2.0
"""Parses the remote tiers of a benchmark's ``--tier``, and starts local servers for them."""

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

from reporting import echo

from kv_offload.tiers.registry import entry_at, kinds

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "python"))

_PREFIX_KEYS = ("key_prefix", "prefix")  # setting names, depending on the type of tier


def entry_of(text: str) -> dict[str, Any]:
    """Parses ``TYPE=PLACE`` or a table of secondary_tiers as JSON, and adds a new, unique prefix.

    The prefix prevents hits on records of earlier runs. Raises SystemExit for a kind without a prefix
    setting.
    """
    entry: dict[str, Any] = json.loads(text) if text.startswith("{") else entry_at(text)
    kind = kinds().get(entry.get("type", ""))
    keys = [key for key in _PREFIX_KEYS if kind is not None and key in kind.model_fields]
    if not keys:
        raise SystemExit(f"--tier {text} is of no kind beyond the host: give redis=URL, s3=BUCKET or JSON")
    prefix = f"bench-{uuid.uuid4().hex}"
    echo(f"records go under the prefix {prefix}: {text}")
    return {**entry, keys[0]: prefix}


@contextlib.contextmanager
def own_redis() -> Iterator[str]:
    """Starts a redis-server on loopback for all systems, and yields its ``--tier``."""
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
    """Starts SeaweedFS on loopback, and yields its ``--tier``. Puts its credentials in the environment."""
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
    """Starts Mooncake's master and a 2 GiB storage process on loopback, and yields their ``--tier``."""
    from mooncake_store import mooncake_store

    with (
        tempfile.TemporaryDirectory() as directory,
        mooncake_store(Path(directory), holder_bytes=2 << 30) as running,
    ):
        yield f"mooncake={running.address}"


OWN = {"redis": own_redis, "s3": own_s3, "mooncake": own_mooncake}
