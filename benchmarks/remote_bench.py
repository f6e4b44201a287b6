"""What a tier beyond the host reads and writes a second, against its client library alone.

    python benchmarks/remote_bench.py redis|s3|s3-tls|mooncake --programs build/bench [--keep] [options]

Starts a server of its own on loopback, and redis_bench, s3_bench or mooncake_bench from this directory, to
which it hands on the other options; each tells what it compares. ``--keep`` keeps what it prints under
results/.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from reporting import write_results
from tier_places import own_redis, own_s3

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "python"))


@contextlib.contextmanager
def redis_options() -> Iterator[list[str]]:
    with own_redis() as tier:
        yield ["--port", str(urlsplit(tier.partition("=")[2]).port)]


@contextlib.contextmanager
def s3_options() -> Iterator[list[str]]:
    """Both sign what they send, as it has to be without TLS."""
    with own_s3() as tier:
        entry = json.loads(tier)
        yield ["--endpoint", entry["endpoint"], "--bucket", entry["bucket"], "--signed", "1"]


@contextlib.contextmanager
def s3_tls_options() -> Iterator[list[str]]:
    from s3_server import ACCESS, BUCKET, SECRET, S3Server, certificate

    os.environ |= {"AWS_ACCESS_KEY_ID": ACCESS, "AWS_SECRET_ACCESS_KEY": SECRET}
    with tempfile.TemporaryDirectory() as directory:
        own = certificate(Path(directory))
        server = S3Server(Path(directory), tls=own)
        try:
            server.start()
            yield ["--endpoint", server.secure, "--bucket", BUCKET, "--ca-file", str(own)]
        finally:
            server.kill()


@contextlib.contextmanager
def mooncake_options() -> Iterator[list[str]]:
    from mooncake_store import mooncake_store

    alone = Path(__file__).with_name("mooncake_alone.py")
    with (
        tempfile.TemporaryDirectory() as directory,
        mooncake_store(Path(directory), holder_bytes=1 << 30) as running,
    ):
        yield ["--python", sys.executable, "--alone", str(alone), "--master", running.address]


KINDS = {"redis": redis_options, "s3": s3_options, "s3-tls": s3_tls_options, "mooncake": mooncake_options}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--programs", type=Path, required=True, help="where they were built")
    parser.add_argument("--keep", action="store_true")
    arguments, options = parser.parse_known_args()
    program = arguments.programs / f"{arguments.kind.removesuffix('-tls')}_bench"
    with KINDS[arguments.kind]() as where:
        done = subprocess.run([program, *where, *options], stdout=subprocess.PIPE, text=True)
    print(done.stdout)
    if done.returncode != 0:
        sys.exit(done.returncode)
    if arguments.keep:
        write_results(f"{arguments.kind}_bench", {"options": options, "cells": json.loads(done.stdout)})


if __name__ == "__main__":
    main()
