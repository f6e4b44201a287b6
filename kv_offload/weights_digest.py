# SPDX-License-Identifier: Apache-2.0
"""A digest of weight files that reads a few MiB, including a part of every tensor.

A fine-tune, or an adapter merged into its model, may change a few tensors and keep names, sizes and most of
the files. So the header of a safetensors file is read and each of its tensors is sampled. Files of other
formats are sampled at even distances. The samples depend only on the number of tensors: the same files have
the same digest on every machine, however slow.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# (tensors at most, places in each, bytes of each place): dense models, mixtures of experts, the largest ones.
_PLANS = ((2_048, 3, 4096), (16_384, 3, 1024), (1 << 62, 1, 512))
_END_BYTES = 64 << 10  # read at each end of a file of another format
_SPREAD_SAMPLES = 4096  # over all files of other formats
_SPREAD_BYTES = 4096
_MAX_HEADER_BYTES = 256 << 20
_THREADS = 16  # network storage has high latency but serves many requests at once

Span = tuple[int, int]  # first byte, end


def weights_digest(files: Sequence[Path]) -> str:
    """Returns the sha256 (hex) of the names, sizes and samples of ``files``. Raises OSError if one is
    unreadable."""
    tensors = {file: _safetensors_spans(file) for file in files}
    plan = next(plan for plan in _PLANS if sum(map(len, filter(None, tensors.values()))) <= plan[0])
    others = sum(file.stat().st_size for file, spans in tensors.items() if spans is None)
    digest = hashlib.sha256()
    with ThreadPoolExecutor(_THREADS) as pool:
        for file, spans in tensors.items():
            size = file.stat().st_size
            digest.update(f"{file.name}\0{size}\0".encode())
            samples = _spread(size, others) if spans is None else _samples_of_each(spans, *plan[1:])
            for part in _read(pool, file, samples):
                digest.update(part)
    return digest.hexdigest()


def _safetensors_spans(file: Path) -> list[Span] | None:
    """Returns the spans of header and tensors of a safetensors file; None for other formats."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        end = 8 + length
        if file.suffix != ".safetensors" or not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
            return None
        try:
            header = json.loads(stream.read(length))
            offsets = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
            spans = sorted((end + int(first), end + int(last)) for first, last in offsets)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
    if any(not end <= first <= last <= size for first, last in spans):
        return None
    return [(0, end), *spans]


def _samples_of_each(spans: Sequence[Span], places: int, length: int) -> Iterable[Span]:
    """Returns the whole header, and for each tensor its start, middle and end, or only its middle."""
    yield spans[0]
    for first, end in spans[1:]:
        if end - first <= places * length:
            yield first, end
            continue
        middle = first + (end - first - length) // 2
        starts = (first, middle, end - length) if places == 3 else (middle,)
        yield from ((start, start + length) for start in starts)


def _spread(size: int, total: int) -> Iterable[Span]:
    """Returns both ends of a file of ``size`` bytes and places between; all such files have ``total``
    bytes."""
    yield 0, min(size, _END_BYTES)
    step = max(2 * _SPREAD_BYTES, total // _SPREAD_SAMPLES)
    for start in range(_END_BYTES, size - _END_BYTES, step):
        yield start, start + _SPREAD_BYTES
    yield max(_END_BYTES, size - _END_BYTES), size


def _read(pool: ThreadPoolExecutor, file: Path, samples: Iterable[Span]) -> Iterable[bytes]:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        yield from pool.map(lambda span: os.pread(descriptor, max(0, span[1] - span[0]), span[0]), samples)
    finally:
        os.close(descriptor)
