# SPDX-License-Identifier: Apache-2.0
"""csrc/backends/s3/bind_s3.cc: an s3 tier under a cache, with a third-party store that verifies
signatures."""

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from s3_server import ACCESS, BUCKET, READER, SECRET, S3Server, certificate, expired_certificate
from small_core import attach, keys, make_cache, store

from kv_offload import _core

HIT = 1
WRONG = "hunter2-never-shown"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    directory = tmp_path_factory.mktemp("s3")
    running = S3Server(directory, tls=certificate(directory))
    try:
        running.start()
        yield running
    finally:
        running.kill()


@pytest.fixture
def region(tmp_path: Path) -> Any:
    return attach(tmp_path)


@pytest.fixture
def namespace(request: pytest.FixtureRequest) -> bytes:
    """Returns this test's namespace: the tests share a bucket."""
    return request.node.nodeid.encode()[-32:].rjust(32)


def bucket(server: S3Server, **given: Any) -> _core.S3Bucket:
    options = {"name": BUCKET, "endpoint": server.endpoint, "path_style": True}
    return _core.S3Bucket(**{**options, "access_key": ACCESS, "secret_key": SECRET, **given})


def s3_tier(**given: Any) -> _core.S3Tier:
    return _core.S3Tier(**given, op_timeout_seconds=240.0)


def step_until(cache: Any, done: Callable[[], bool]) -> None:
    """Steps the scheduler, with pauses for the tier's threads, until ``done()``."""
    pause = threading.Event()
    deadline = time.monotonic() + 240
    while not done():
        assert time.monotonic() < deadline, cache.tier_stats(0)
        cache.end_step()
        pause.wait(0.005)


def record(
    server: S3Server, region: Any, spec: _core.S3Tier, namespace: bytes, count: int = 5
) -> list[bytes]:
    """Stores ``count`` records with a cache that is closed again."""
    folder = f"kv_offload/{namespace.hex()}"
    cache = make_cache(region[0], tiers=[spec])
    wanted = store(cache, region[1][0], cache.begin_request("r"), keys(count))
    step_until(cache, lambda: len(server.records(folder)) == count)
    cache.close()
    return wanted


@pytest.mark.parametrize("style", ["in the path", "in the host's name", "over TLS"])
def test_a_new_cache_loads_the_records(server, region, namespace, style) -> None:
    given = {
        "in the path": {},
        "in the host's name": {"endpoint": server.domain, "path_style": False},
        "over TLS": {"endpoint": server.secure, "ca_file": str(server.tls)},
    }[style]
    spec = s3_tier(bucket=bucket(server, **given), namespace_id=namespace)
    wanted = record(server, region, spec, namespace)
    cache = make_cache(region[0], tiers=[spec], load_policy="always", lookup_timeout_seconds=240.0)
    request = cache.begin_request("r")
    step_until(cache, lambda: all(cache.lookup(request, key) == HIT for key in wanted))
    assert cache.load_source(wanted[0]) == 0
    cache.close()


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"secret_key": WRONG}, "refuses the signature"),
        ({"access_key": WRONG}, "does not know the access key"),
        ({"name": "another-bucket"}, "the bucket does not exist"),
    ],
)
def test_a_permanent_error_is_refused_at_start(server, region, namespace, given, sentence) -> None:
    spec = s3_tier(bucket=bucket(server, **given), namespace_id=namespace)
    with pytest.raises(_core.ResourceError, match=sentence) as caught:
        make_cache(region[0], tiers=[spec])
    assert WRONG not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_running_engine_uses_replaced_keys(server, region, namespace) -> None:
    given = bucket(server)
    renewer = given.renewer()
    spec = s3_tier(bucket=given, namespace_id=namespace)
    folder = f"kv_offload/{namespace.hex()}"
    metrics = _core.Metrics()
    cache = make_cache(region[0], metrics, tiers=[spec])
    del given, spec
    renewer.set(ACCESS, WRONG)
    request = cache.begin_request("r")
    store(cache, region[1][0], request, keys(1))
    step_until(cache, lambda: metrics.value("kv_offload_failures_total", ["s3", "write", "io"]) == 1)
    assert server.records(folder) == []
    renewer.set(ACCESS, SECRET)
    store(cache, region[1][0], request, keys(1, first=2))
    step_until(cache, lambda: len(server.records(folder)) == 1)
    assert renewer.is_used
    cache.close()
    del cache
    assert not renewer.is_used


def test_a_tier_that_only_reads_needs_no_permission_to_write(server, region, namespace) -> None:
    spec = s3_tier(bucket=bucket(server), namespace_id=namespace)
    wanted = record(server, region, spec, namespace)
    reads = s3_tier(bucket=bucket(server, access_key=READER), namespace_id=namespace)
    reads.write_policy = "read_only"
    cache = make_cache(region[0], tiers=[reads], load_policy="always", lookup_timeout_seconds=240.0)
    request = cache.begin_request("r")
    step_until(cache, lambda: all(cache.lookup(request, key) == HIT for key in wanted))
    cache.close()


def test_an_untrusted_certificate_is_refused(server, region, namespace) -> None:
    spec = s3_tier(bucket=bucket(server, endpoint=server.secure), namespace_id=namespace)
    with pytest.raises(_core.ResourceError, match="certificate"):
        make_cache(region[0], tiers=[spec])


def test_an_expired_certificate_is_refused_even_if_trusted(
    region: Any, namespace: bytes, tmp_path: Path
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trusted = expired_certificate(tmp_path)
    context.load_cert_chain(trusted, tmp_path / "key.pem")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=shake_hands, args=(listener, context))
        thread.start()
        address = f"https://127.0.0.1:{listener.getsockname()[1]}"
        given = _core.S3Bucket(
            name=BUCKET,
            endpoint=address,
            path_style=True,
            access_key=ACCESS,
            secret_key=SECRET,
            ca_file=str(trusted),
        )
        try:
            with pytest.raises(_core.ResourceError, match="certificate"):
                make_cache(region[0], tiers=[s3_tier(bucket=given, namespace_id=namespace)])
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def shake_hands(listener: socket.socket, context: ssl.SSLContext) -> None:
    """Shakes hands with every client and serves no request."""
    with contextlib.suppress(OSError):
        while True:
            connection, _ = listener.accept()
            with contextlib.suppress(OSError), context.wrap_socket(connection, server_side=True):
                pass


def test_a_record_damaged_in_the_store_is_a_miss_and_removed(server, region, namespace) -> None:
    spec = s3_tier(bucket=bucket(server), namespace_id=namespace)
    wanted = record(server, region, spec, namespace)
    (damaged,) = [
        name for name in server.records(f"kv_offload/{namespace.hex()}") if name.endswith(wanted[2].hex())
    ]
    content = bytearray(server.read(damaged))
    content[5000] ^= 1
    server.overwrite(damaged, bytes(content))
    cache = make_cache(region[0], tiers=[spec], load_policy="always", lookup_timeout_seconds=240.0)
    request = cache.begin_request("r")
    step_until(cache, lambda: [cache.lookup(request, key) for key in wanted] == [HIT, HIT, 0, HIT, HIT])
    step_until(cache, lambda: damaged not in server.records())
    cache.close()
