# SPDX-License-Identifier: Apache-2.0
"""A directory seen through a disk that is slow, frozen or broken on demand: slow_disk.cc, built and run.

    with SlowDisk(directory, mountpoint, program=build(folder)) as disk:
        disk.tell(read_bytes_per_second=5_000_000)

It needs /dev/fuse, the right to mount, and fuse3's headers to build (Debian: libfuse3-dev).
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
from pathlib import Path
from types import TracebackType

SOURCE = Path(__file__).with_name("slow_disk.cc")
END_SECONDS = 20.0


class NoFuseError(RuntimeError):
    """This machine does not let us mount with FUSE; the text says what is missing."""


def build(folder: Path) -> Path:
    """Compiles the program into ``folder``. CalledProcessError, with the reason printed, when that fails."""
    flags = subprocess.run(
        ["pkg-config", "--cflags", "--libs", "fuse3"], check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    program = folder / "slow_disk"
    compiler = os.environ.get("CXX", "c++")
    subprocess.run(
        [compiler, "-std=c++20", "-O1", str(SOURCE), *shlex.split(flags), "-pthread", "-o", str(program)],
        check=True,
        timeout=300,
    )
    return program


class SlowDisk:
    """``directory`` mounted at ``mountpoint`` (made if missing) while the block runs.

    ``locks``: two such mounts of one directory are two hosts whose file locks reach each other.

    Raises NoFuseError where the machine forbids it. Whatever happens, the mount goes when this process ends:
    the program lives as long as its standard input.
    """

    def __init__(self, directory: Path, mountpoint: Path, program: Path, *, locks: bool = False) -> None:
        self.directory = directory
        self.mountpoint = mountpoint
        self.program = program
        self.locks = locks
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> SlowDisk:
        try:
            os.close(os.open("/dev/fuse", os.O_RDWR))
        except OSError as error:
            raise NoFuseError(f"/dev/fuse cannot be opened: {error.strerror}") from error
        self.directory.mkdir(parents=True, exist_ok=True)
        self.mountpoint.mkdir(parents=True, exist_ok=True)
        self._process = subprocess.Popen(
            [
                str(self.program),
                str(self.directory),
                str(self.mountpoint),
                *(["locks"] if self.locks else []),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        if self._process.stdout.readline() == "mounted\n":
            return self
        said = self._process.stderr.read().strip()
        self._end()
        if "not permitted" in said or "ermission denied" in said:
            raise NoFuseError(f"mounting with FUSE is forbidden here: {said}")
        raise RuntimeError(f"the slow disk could not be mounted: {said}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def tell(self, **settings: int) -> dict[str, int]:
        """Applies settings (see slow_disk.cc), which hold when this returns; gives the counts so far."""
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        answer = ""
        for name, value in (settings or {"counts": 0}).items():
            print(name, value, file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline().strip()
            if not answer.startswith("ok "):
                raise ValueError(f"the slow disk says: {answer or 'nothing, it has ended'}")
        pairs = (word.split("=") for word in answer.split()[1:])
        return {name: int(value) for name, value in pairs}

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        if f" {self.mountpoint} " in Path("/proc/self/mounts").read_text():  # it had to be killed
            subprocess.run(["umount", "-l", str(self.mountpoint)], check=True)
