# SPDX-License-Identifier: Apache-2.0
"""KV events of an idle server: a subscriber learns of removals by others without another request."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import records
import zmq
from answers import make_prompts
from local_server import LocalServer, free_port
from setting import PROMPT_BLOCKS, Serve, patient_config

WAIT_SECONDS = 240


class Subscriber:
    """The hashes that a router would believe to be on storage."""

    def __init__(self, endpoint: str) -> None:
        self.socket = zmq.Context.instance().socket(zmq.SUB)
        self.socket.setsockopt(zmq.SUBSCRIBE, b"")
        self.socket.connect(endpoint)
        self.stored: set[bytes | int] = set()

    def receive_until(self, count: int) -> None:
        """Receives events until ``count`` chunks are stored."""
        ends = time.monotonic() + WAIT_SECONDS
        while len(self.stored) != count:
            assert time.monotonic() < ends, f"{len(self.stored)} chunks are advertised instead of {count}"
            self.receive(1000)

    def receive(self, milliseconds: int) -> None:
        """Receives one message, unless none arrives in that time."""
        if not self.socket.poll(milliseconds):
            return
        _, _, payload = self.socket.recv_multipart()
        for event in msgspec.msgpack.decode(payload)[1]:
            if event.get("medium") != "STORAGE":
                continue
            if event["type"] == "BlockStored":
                self.stored.update(event["block_hashes"])
            else:
                self.stored.difference_update(event["block_hashes"])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def subscribed(start: Serve, model: Path, root: Path) -> Iterator[tuple[LocalServer, Subscriber]]:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    config = patient_config("512MiB", root)
    config["kv_connector_extra_config"]["self_describing_kv_events"] = True
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": endpoint.replace("127.0.0.1", "*"),
    }
    server = start(model, config, arguments=["--kv-events-config", json.dumps(events)])
    subscriber = Subscriber(endpoint)
    yield server, subscriber
    subscriber.socket.close()
    server.stop()


def test_an_idle_server_publishes_removals_by_others(
    subscribed: tuple[LocalServer, Subscriber], root: Path
) -> None:
    server, subscriber = subscribed
    (prompt,) = make_prompts(1, PROMPT_BLOCKS)
    server.ask(prompt, max_tokens=1)
    ends = time.monotonic() + WAIT_SECONDS
    while len(subscriber.stored) < PROMPT_BLOCKS:
        assert time.monotonic() < ends, "the stores are not published"
        server.ask(prompt[:1], max_tokens=1)  # stores are published with the next request
        subscriber.receive(100)

    evict = "from kv_offload.cli import main; main()"
    command = [sys.executable, "-c", evict, "evict", str(root), "--max-bytes", "1MiB"]
    subprocess.run(command, check=True, timeout=600)
    left = len(records.files(root))
    assert left < PROMPT_BLOCKS
    subscriber.receive_until(left)
