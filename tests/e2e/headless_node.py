# SPDX-License-Identifier: Apache-2.0
"""Runs the ranks of a host without the scheduler, as ``vllm serve --headless`` does.

The command itself does not start in the CPU build of vLLM. With the address of a host in
KV_OFFLOAD_TEST_ADDRESS, the processes enter new network, mount and IPC namespaces, and wait until
second_host.py has assigned that address.
"""

import ctypes
import os
import socket
import time

from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

NEW_NAMESPACES = 0x40000000 | 0x00020000 | 0x08000000  # CLONE_NEWNET, CLONE_NEWNS, CLONE_NEWIPC
PRIVATE = 0x4000 | 0x40000  # MS_REC, MS_PRIVATE
PATIENCE_SECONDS = 240


def enter_host(address: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)

    def call(result: int, what: str) -> None:
        if result != 0:
            raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")

    call(libc.unshare(NEW_NAMESPACES), "unshare")
    call(libc.mount(b"none", b"/", None, PRIVATE, None), "a private mount of /")
    call(libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, None), "a tmpfs at /dev/shm")
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not has_address(address):
        if time.monotonic() > deadline:
            raise TimeoutError(f"no interface has the address {address}")
        time.sleep(0.02)


def has_address(address: str) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


if __name__ == "__main__":
    if address := os.environ.get("KV_OFFLOAD_TEST_ADDRESS"):
        enter_host(address)
    ServeSubcommand.cmd(make_arg_parser(FlexibleArgumentParser()).parse_args())
