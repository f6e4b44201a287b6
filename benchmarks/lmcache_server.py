# SPDX-License-Identifier: Apache-2.0
"""LMCache's server, alone or with the same Redis or S3 tier, for comparison.

LMCache's connector starts the server, which ends with vLLM.
LMCache needs other versions of packages that vLLM also uses, so install it into a separate directory:

    pip install --no-deps --target DIRECTORY lmcache==0.5.6 aiofile aiofiles awscrt boto3 botocore caio \\
        jmespath nvtx opentelemetry-exporter-prometheus python-dateutil redis s3transfer six sortedcontainers
    PYTHONPATH=DIRECTORY python benchmarks/remote_reload.py --tier redis --tier s3
"""

from __future__ import annotations

import importlib.util
import json
import shlex
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from local_server import free_port


def is_installed() -> bool:
    return importlib.util.find_spec("lmcache") is not None


class LMCacheServer:
    """vLLM's configuration for LMCache, and LMCache's status. Raises ValueError for an unsupported tier.

    ``entry``: the tier below host memory; None: host memory only.
    """

    def __init__(self, entry: dict[str, Any] | None, host_bytes: int) -> None:
        self._status_port = free_port()
        arguments = ["--l1-size-gb", str(host_bytes / 1024**3), "--eviction-policy", "LRU"]
        arguments += ["--http-port", str(self._status_port), "--disable-observability"]
        if entry is not None:
            arguments += ["--l2-adapter", json.dumps(_adapter(entry))]
        self.kv_transfer = {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "127.0.0.1",
                "lmcache.mp.port": free_port(),
                "lmcache.mp.mp_transfer_mode": "lmcache_driven",  # on CPU: vLLM's cache in shared memory
                "lmcache.mp.autostart": True,
                "lmcache.mp.autostart.wait_timeout": 300,
                "lmcache.mp.autostart.server_args": shlex.join(arguments),
            },
        }

    def has_written(self) -> bool:
        """True if no writes from its host memory to the tier below are pending."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._status_port}/status", timeout=30) as answer:
            stores = json.load(answer)["storage_manager"]["store_controllers"].values()
        return not any(each["pending_keys_count"] or each["in_flight_task_count"] for each in stores)


def model_named(entry: dict[str, Any], model: Path, directory: Path) -> Path:
    """Returns the model's path, relative to ``directory``, that LMCache uses as the prefix of its keys.

    LMCache supports S3 buckets only in the host name, which not every loopback name can contain. Its keys
    begin with the model's path. A path that begins with the bucket therefore turns its requests into
    path-style ones.
    """
    if entry["type"] != "s3":
        return model
    link: Path = directory / entry["bucket"] / entry["prefix"]
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(model)
    return link.relative_to(directory)


def _adapter(entry: dict[str, Any]) -> dict[str, Any]:
    """Returns LMCache's settings for its tier below host memory. S3 credentials are in the environment."""
    url = urlsplit(entry.get("url") or entry.get("endpoint") or "")
    if entry["type"] == "redis" and url.scheme == "redis":
        return {"type": "resp", "host": url.hostname, "port": url.port or 6379}
    if entry["type"] == "s3" and url.scheme:
        region, plain = entry.get("region", "us-east-1"), url.scheme == "http"
        return {"type": "s3", "s3_endpoint": url.netloc, "s3_region": region, "disable_tls": plain}
    raise ValueError("it can be given redis://HOST:PORT, or S3 with an endpoint")
