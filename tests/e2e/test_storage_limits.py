# SPDX-License-Identifier: Apache-2.0
"""A bounded directory and a full file system: the bound holds, and the answers do not change."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import records
import waiting
from answers import assert_same, make_prompts
from live_root import used_bytes
from local_server import Answer
from setting import PROMPT_BLOCKS, Reference, Serve, patient_config

MIB = 1024**2
RECORD = MIB + records.HEADER


def test_a_directory_never_grows_beyond_its_bound(
    start: Serve, model: Path, reference: Reference, tmp_path: Path
) -> None:
    bound = 36 * MIB  # the prompts need four times as much
    assert len(reference.prompts) * PROMPT_BLOCKS * RECORD > 4 * bound
    with (
        start(model, patient_config("512MiB", tmp_path, max_bytes=bound)) as server,
        records.UsageWatch(tmp_path) as watch,
    ):
        answers = [server.ask(prompt) for prompt in reference.prompts]
        waiting.recorded(tmp_path, 30, server)

        def evicted() -> bool:
            waiting.step(server)
            return server.metric("kv_offload_evicted_bytes_total", tier="fs") > 0

        waiting.until(evicted, 240, "evictions")
    assert_same(answers, reference.answers)
    assert watch.samples > 20
    assert bound / 2 < watch.peak <= bound + RECORD


@contextmanager
def _mounted(*arguments: str, at: Path) -> Iterator[Path]:
    """Mounts with these options of ``mount``, at a new directory."""
    at.mkdir()
    mounted = subprocess.run(["mount", *arguments, str(at)], capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"mounting needs root: {mounted.stderr.strip()}")
    yield at
    subprocess.run(["umount", "-l", str(at)], check=True)


@pytest.fixture
def small_filesystem(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 64 MiB."""
    with _mounted("-t", "tmpfs", "-o", "size=64m", "tmpfs", at=tmp_path / "small") as directory:
        yield directory


def test_a_full_file_system_costs_only_hits(
    start: Serve, model: Path, reference: Reference, small_filesystem: Path
) -> None:
    root = small_filesystem / "root"
    root.mkdir()
    with start(model, patient_config("64MiB", root, max_bytes="48MiB")) as server:
        # Another program takes the space that was free when the server started.
        ballast = small_filesystem / "ballast"
        free = os.statvfs(small_filesystem).f_bavail * 4096
        ballast.write_bytes(bytes(free - 10 * MIB))
        answers = [server.ask(prompt) for prompt in reference.prompts + reference.prompts]
        waiting.written(server)
        # The newest records replace older ones, although the tier holds less than its bound.
        assert server.metric("kv_offload_evicted_bytes_total", tier="fs") > 0
        assert "is full although the tier has" in server.log_file.read_text()
        held = records.files(root)
        assert used_bytes(root) <= len(held) * RECORD + MIB, "partial files were left"
        # Once space is free again, new records are written.
        ballast.unlink()
        _ask_until_recorded(server.ask, root, len(held) + PROMPT_BLOCKS)
    assert_same(answers, reference.answers * 2)


@pytest.fixture
def failing_filesystem(tmp_path: Path) -> Iterator[Path]:
    """Yields an ext4 file system of 128 MiB in a file."""
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(128 * MIB)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    with _mounted("-o", "loop", str(image), at=tmp_path / "ext4") as directory:
        yield directory


def test_a_file_system_that_turns_read_only_is_read_on(
    start: Serve, model: Path, reference: Reference, failing_filesystem: Path
) -> None:
    root = failing_filesystem / "root"
    root.mkdir()
    with start(model, patient_config("64MiB", root, max_bytes="64MiB")) as server:
        answers = [server.ask(prompt) for prompt in reference.prompts[:2]]
        waiting.recorded(root, 2 * PROMPT_BLOCKS, server)
        # Data that the kernel has not written yet is lost on an abort, as on a power failure.
        subprocess.run(["sync", "--file-system", str(failing_filesystem)], check=True)
        held = records.files(root)
        # As after a device error, the kernel refuses every write, also to open files.
        subprocess.run(["mount", "-o", "remount,abort", str(failing_filesystem)], check=True)
        answers += [server.ask(prompt) for prompt in reference.prompts[2:]]
        waiting.written(server)
        loaded = server.metric("kv_offload_hit_tokens_total", tier="fs")
        answers.append(server.ask(reference.prompts[0]))  # no longer in host memory
        assert server.metric("kv_offload_failures_total", tier="fs", op="write", kind="io") > 0
        assert server.metric("kv_offload_hit_tokens_total", tier="fs") > loaded
        assert set(records.files(root)) == set(held)
    assert_same(answers, [*reference.answers, reference.answers[0]])


def _ask_until_recorded(ask: object, root: Path, count: int) -> None:
    """Sends new prompts until ``count`` records exist: failures may disable writes for a while."""
    assert callable(ask)
    seeds = itertools.count(1000)

    def enough() -> bool:
        (prompt,) = make_prompts(1, PROMPT_BLOCKS, seed=next(seeds))
        answer = ask(prompt)
        assert isinstance(answer, Answer)
        return len(records.files(root)) >= count

    waiting.until(enough, 300, f"{count} records again")
