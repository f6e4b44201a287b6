# SPDX-License-Identifier: Apache-2.0
"""A Prometheus on this machine that scrapes one address every second, as a context manager.

    with prometheus("127.0.0.1:8000", folder) as base:
        urllib.request.urlopen(f"{base}/api/v1/query?query=up")

Needs the program ``prometheus`` (Debian: apt-get install prometheus).
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from local_server import free_port

START_SECONDS = 120.0


@contextlib.contextmanager
def prometheus(target: str, folder: Path) -> Iterator[str]:
    """Yields its address, http://127.0.0.1:PORT, once it answers. Configuration, data and log are in
    ``folder``.

    Raises RuntimeError with the log if it does not start.
    """
    job = {"job_name": "vllm", "static_configs": [{"targets": [target]}]}
    file, log = folder / "prometheus.yml", folder / "prometheus.log"
    scraping = {"global": {"scrape_interval": "1s", "scrape_timeout": "1s"}, "scrape_configs": [job]}
    file.write_text(json.dumps(scraping))  # JSON is YAML
    address = f"127.0.0.1:{free_port()}"
    options = [f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["prometheus", *options, f"--web.listen-address={address}"],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        _wait_until_ready(process, f"http://{address}", log)
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(START_SECONDS)


def _wait_until_ready(process: subprocess.Popen[bytes], base: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            urllib.request.urlopen(f"{base}/-/ready", timeout=2).close()
            return
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(
                    f"prometheus does not answer:\n{log.read_text(errors='replace')}"
                ) from None
            time.sleep(0.1)
