# SPDX-License-Identifier: Apache-2.0
"""The digest of weights covers every tensor, and reads few bytes."""

import json
import os
from pathlib import Path

import pytest

from kv_offload import weights_digest as module
from kv_offload.weights_digest import weights_digest

MIB = 1 << 20


def safetensors(path: Path, tensors: int, each: int, header: dict[str, object] | None = None) -> Path:
    """Creates a sparse file of zeros with a valid header: tensor n has bytes [n * each, + each)."""
    entries = {
        f"layers.{n}.weight": {"dtype": "U8", "shape": [each], "data_offsets": [n * each, (n + 1) * each]}
        for n in range(tensors)
    }
    text = json.dumps(entries | (header or {})).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + tensors * each)
    return path


def change(path: Path, offset: int, count: int = 1) -> None:
    """Changes bytes at ``offset`` (from the end if negative); size and name stay."""
    with path.open("r+b") as file:
        file.seek(offset, os.SEEK_END if offset < 0 else os.SEEK_SET)
        old = file.read(count)
        file.seek(-len(old), os.SEEK_CUR)
        file.write(bytes(byte ^ 1 for byte in old))


@pytest.mark.parametrize("tensor", range(0, 40, 3))
def test_a_fine_tune_of_one_tensor_is_detected_at_any_place(tmp_path, tensor):
    """40 tensors of 1 MiB: the middle ones are far from both ends of the file."""
    file = safetensors(tmp_path / "model.safetensors", 40, MIB)
    before = weights_digest([file])
    change(file, -(40 - tensor) * MIB, MIB)
    assert weights_digest([file]) != before


@pytest.mark.parametrize("place", [0, MIB // 2, MIB - 1])
def test_start_middle_and_end_of_a_tensor_are_read(tmp_path, place):
    file = safetensors(tmp_path / "model.safetensors", 3, MIB)
    before = weights_digest([file])
    change(file, -2 * MIB + place)
    assert weights_digest([file]) != before


def test_a_tensor_with_another_name_or_type_changes_the_digest(tmp_path):
    file = safetensors(tmp_path / "model.safetensors", 3, 64)
    before = weights_digest([file])
    change(file, file.read_bytes().index(b"layers.1"))
    assert weights_digest([file]) != before


@pytest.mark.parametrize("tensors", [2_049, 16_385])
def test_every_tensor_of_a_large_mixture_of_experts_is_still_read(tmp_path, tensors):
    file = safetensors(tmp_path / "model.safetensors", tensors, 16 << 10)
    before = weights_digest([file])
    change(file, -(tensors // 3) * (16 << 10), 16 << 10)
    assert weights_digest([file]) != before


@pytest.mark.parametrize(("tensors", "most"), [(700, 9), (2_048, 25), (10_000, 31), (20_000, 12)])
def test_few_bytes_are_read_for_any_number_of_tensors(tmp_path, monkeypatch, tensors, most):
    read = []
    pread = os.pread
    monkeypatch.setattr(module.os, "pread", lambda *args: read.append(args[1]) or pread(*args))
    weights_digest([safetensors(tmp_path / "model.safetensors", tensors, 64 << 10)])
    assert sum(read) <= most * MIB
    assert len(read) <= 3 * tensors + 1


def test_files_of_other_formats_are_sampled_throughout(tmp_path):
    file = tmp_path / "model.gguf"
    with file.open("wb") as stream:
        stream.truncate(64 * MIB)
    before = weights_digest([file])
    change(file, 20 * MIB, MIB // 4)
    assert weights_digest([file]) != before


def test_bytes_read_of_other_formats_are_bounded_over_all_files(tmp_path, monkeypatch):
    files = []
    for number in range(4):
        files.append(tmp_path / f"model-{number}.bin")
        with files[-1].open("wb") as stream:
            stream.truncate(40 << 30)
    read = []
    pread = os.pread
    monkeypatch.setattr(module.os, "pread", lambda *args: read.append(args[1]) or pread(*args))
    weights_digest(files)
    assert sum(read) <= 18 * MIB


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"short",
        (1 << 62).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (8).to_bytes(8, "little") + b"{no json",
        (8).to_bytes(8, "little") + b'{"a": 1}',
        (31).to_bytes(8, "little") + b'{"a": {"data_offsets": [0, 99]}',
        (32).to_bytes(8, "little") + b'{"a": {"data_offsets": [0, 99]}}',
        (31).to_bytes(8, "little") + b'{"a": {"data_offsets": [5, 1]}}',
    ],
)
def test_with_a_broken_header_the_bytes_still_count(tmp_path, content):
    file = tmp_path / "model.safetensors"
    file.write_bytes(content + b"tail")
    before = weights_digest([file])
    file.write_bytes(content + b"TAIL")
    assert weights_digest([file]) != before
