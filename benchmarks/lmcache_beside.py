# SPDX-License-Identifier: Apache-2.0
"""LMCache's server above the same Redis or S3, for comparison: its connector starts it, it ends with vLLM.

It asks for other versions of packages that vLLM has too, so it goes into a directory of its own:

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
    """What vLLM is told of it, and what it tells. ValueError for a place that it cannot use."""

    def __init__(self, entry: dict[str, Any], host_bytes: int) -> None:
        self._status_port = free_port()
        arguments = ["--l1-size-gb", str(host_bytes / 1024**3), "--eviction-policy", "LRU"]
        arguments += ["--http-port", str(self._status_port), "--disable-observability"]
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
        """Nothing that is in its host memory waits to be written below it."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._status_port}/status", timeout=30) as answer:
            stores = json.load(answer)["storage_manager"]["store_controllers"].values()
        return not any(each["pending_keys_count"] or each["in_flight_task_count"] for each in stores)


def model_named(entry: dict[str, Any], model: Path, directory: Path) -> Path:
    """The path of the model, from ``directory``, under which LMCache keeps what it stores at this place.

    It has S3's buckets in the host's name only, which not every name on loopback can hold. As its keys begin
    with the model's path, one that begins with the bucket makes its requests those of a bucket in the path.
    """
    if entry["type"] != "s3":
        return model
    link: Path = directory / entry["bucket"] / entry["prefix"]
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(model)
    return link.relative_to(directory)


def _adapter(entry: dict[str, Any]) -> dict[str, Any]:
    """Its tier below host memory. The keys of S3 are those of the environment."""
    url = urlsplit(entry.get("url") or entry.get("endpoint") or "")
    if entry["type"] == "redis" and url.scheme == "redis":
        return {"type": "resp", "host": url.hostname, "port": url.port or 6379}
    if entry["type"] == "s3" and url.scheme:
        region, plain = entry.get("region", "us-east-1"), url.scheme == "http"
        return {"type": "s3", "s3_endpoint": url.netloc, "s3_region": region, "disable_tls": plain}
    raise ValueError("it can be given redis://HOST:PORT, or S3 with an endpoint")
