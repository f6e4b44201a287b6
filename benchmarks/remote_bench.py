# SPDX-License-Identifier: Apache-2.0
"""Compares the read and write throughput of a remote tier with its client library alone.

    python benchmarks/remote_bench.py KIND --programs build/bench [--keep] [options]

Starts its own server on loopback, then redis_bench, s3_bench or mooncake_bench from the directory of
``--programs``, with the other options. Each program prints its comparison. ``--keep`` saves its output under
results/.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from reporting import write_results
from tier_places import own_mooncake, own_redis, own_s3


@contextlib.contextmanager
def redis_options() -> Iterator[list[str]]:
    with own_redis() as tier:
        yield ["--port", str(urlsplit(tier.partition("=")[2]).port)]


@contextlib.contextmanager
def s3_options(tls: bool = False) -> Iterator[list[str]]:
    """Yields the program's options. Without TLS, both clients must sign the payloads that they send."""
    with own_s3(tls) as tier:
        entry = json.loads(tier)
        how = ["--ca-file", entry["ca_file"]] if tls else ["--signed", "1"]
        yield ["--endpoint", entry["endpoint"], "--bucket", entry["bucket"], *how]


@contextlib.contextmanager
def mooncake_options(calls: str = "plain") -> Iterator[list[str]]:
    alone = str(Path(__file__).with_name("mooncake_alone.py"))
    with own_mooncake() as tier:
        master = tier.partition("=")[2]
        yield ["--python", sys.executable, "--alone", alone, "--master", master, "--calls", calls]


KINDS: dict[str, Callable[[], AbstractContextManager[list[str]]]] = {
    "redis": redis_options,
    "s3": s3_options,
    "s3-tls": partial(s3_options, tls=True),
    "mooncake": mooncake_options,
    "mooncake-sessions": partial(mooncake_options, calls="sessions"),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--programs", type=Path, required=True, help="where they were built")
    parser.add_argument("--keep", action="store_true")
    arguments, options = parser.parse_known_args()
    program = arguments.programs / f"{arguments.kind.partition('-')[0]}_bench"
    with KINDS[arguments.kind]() as where:
        done = subprocess.run([program, *where, *options], stdout=subprocess.PIPE, text=True)
    print(done.stdout)
    if done.returncode != 0:
        sys.exit(done.returncode)
    if arguments.keep:
        kind, dash, how = arguments.kind.partition("-")
        write_results(f"{kind}_bench{dash}{how}", {"options": options, "cells": json.loads(done.stdout)})


if __name__ == "__main__":
    main()
