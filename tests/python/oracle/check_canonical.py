# SPDX-License-Identifier: Apache-2.0
"""Engines with different numbers of ranks share one root. In the canonical layout they write the same records
and load each other's; where it is not possible they keep theirs apart and log the reason.

Run by test_oracle.py, which also checks every loaded byte.
"""

import hashlib
import struct
from dataclasses import replace
from pathlib import Path

import adapter
import pytest

adapter.use_specs()

from live_root import paths_in  # noqa: E402

from kv_offload import _core  # noqa: E402
from oracle.check_identity import expected_tokens, prompts, serve  # noqa: E402
from oracle.check_oracle import FULL, ask_again, boot, with_disk  # noqa: E402
from oracle.drive import total  # noqa: E402
from oracle.engine import STATE, Setup, make_model_dir  # noqa: E402

HEADS = replace(FULL, layers=3, heads=4, extra={"cpu_bytes_to_use": "4MiB", "canonical_layout": True})
KINDS = {
    "full attention": HEADS,
    "two blocks a chunk": replace(HEADS, extra={**HEADS.extra, "blocks_per_chunk": 2}),
    "hybrid": replace(HEADS, window=40, layers=4),
}


def ranks(setup: Setup, number: int) -> Setup:
    return replace(setup, world_size=number)


def on_disk(setup: Setup, root: Path, number: int) -> Setup:
    return with_disk(ranks(setup, number), root, max_bytes="64MiB")


def records(root: Path) -> dict[str, str]:
    """Maps each record name to a digest of all but its creation time and header checksum."""
    found = {}
    for path in paths_in(root):
        if path.suffix == ".rec":
            content = bytearray(path.read_bytes())
            content[128:136] = content[4088:4096] = bytes(8)
            found[str(path.relative_to(root))] = hashlib.sha256(content).hexdigest()
    return found


def ask_all(setup: Setup, model_dir: str) -> float:
    """Runs one engine life with any setup, as check_identity.serve; returns the tokens loaded from disk."""
    engine = boot(setup, model_dir)
    try:
        ask_again(engine, prompts())
        return total(engine, "kv_offload_hit_tokens_total", "fs")
    finally:
        engine.shutdown()


@pytest.mark.parametrize("kind", KINDS)
def test_1_2_and_4_ranks_write_the_same_records(kind: str, tmp_path: Path) -> None:
    model_dir = make_model_dir()
    written = []
    for number in (1, 2, 4):
        root = tmp_path / str(number)
        assert serve(on_disk(KINDS[kind], root, number), model_dir) == 0
        written.append(records(root))
    assert len(written[0]) > 10
    assert written[0] == written[1] == written[2]


def test_records_of_any_number_of_ranks_are_loaded_by_any_other(tmp_path: Path) -> None:
    model_dir = make_model_dir()
    for writer in (1, 2, 4):
        root = tmp_path / str(writer)
        assert serve(on_disk(HEADS, root, writer), model_dir) == 0
        for reader in {1, 2, 4} - {writer}:
            assert serve(on_disk(HEADS, root, reader), model_dir) == expected_tokens()
        assert len(_core.FsRoot(str(root)).stat()["namespaces"]) == 1


def test_a_record_has_a_shard_for_each_head(tmp_path: Path) -> None:
    root = tmp_path / "root"
    assert serve(on_disk(HEADS, root, 2), make_model_dir()) == 0
    page = next(path for path in paths_in(root) if path.suffix == ".rec").read_bytes()[:4096]
    (shards,) = struct.unpack_from("<I", page, 104)
    head = 16 * 2 * 2 * 4 * HEADS.layers  # tokens, K and V, dimension, float32
    assert struct.unpack_from("<5Q", page, 136) == (head,) * shards + (0,)
    assert shards == HEADS.heads


def test_canonical_and_plain_records_are_never_mixed(tmp_path: Path) -> None:
    """One rank has the same bytes in both layouts, in another order."""
    model_dir = make_model_dir()
    plain = replace(HEADS, extra={"cpu_bytes_to_use": "4MiB"})
    root = tmp_path / "root"
    for setup in (HEADS, plain):
        assert serve(on_disk(setup, root, 1), model_dir) == 0
    for setup in (plain, HEADS):
        assert serve(on_disk(setup, root, 1), model_dir) == expected_tokens()
    assert len(_core.FsRoot(str(root)).stat()["namespaces"]) == 2


def test_a_replicated_latent_cache_is_the_same_for_any_number_of_ranks(tmp_path: Path) -> None:
    latent = replace(FULL, replicated=True, extra={**FULL.extra, "canonical_layout": True})
    model_dir = make_model_dir()
    written = []
    for number in (1, 2):
        root = tmp_path / str(number)
        assert ask_all(on_disk(latent, root, number), model_dir) == 0
        written.append(records(root))
        assert ask_all(on_disk(latent, root, 3 - number), model_dir) == expected_tokens()
    assert written[0] == written[1]


# Per case: the setup, its numbers of ranks, model properties, and the reason why records are kept apart.
REFUSED: dict[str, tuple[Setup, tuple[int, ...], dict[str, int], str]] = {
    "states": (replace(HEADS, window=STATE, heads=None, layers=4), (1, 2), {}, "declares no layout"),
    "packed blocks": (replace(HEADS, layout="BLHNC", heads=None), (1, 2), {}, "share one page"),
    "stages of a pipeline": (
        replace(HEADS, pipelined=True, heads=None, layers=4),
        (2,),
        {},
        "the ranks split layers or tokens",
    ),
    "fewer heads than ranks": (
        replace(HEADS, heads=2),
        (4,),
        {"num_key_value_heads": 2},
        "2 ranks hold the same KV heads; use a tensor-parallel size of at most 2",
    ),
    "not by heads": (replace(HEADS, heads=None), (1, 2), {}, "declares no layout"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_without_the_canonical_layout_records_are_kept_apart_and_the_reason_is_logged(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    setup, numbers, model, reason = REFUSED[name]
    model_dir = make_model_dir(**model)
    root = tmp_path / "root"
    for number in numbers:
        caplog.clear()
        assert serve(on_disk(setup, root, number), model_dir) == 0
        sentences = [
            record.getMessage()
            for record in caplog.records
            if "canonical_layout is not possible here" in record.getMessage()
        ]
        assert len(sentences) == 1
        assert reason in sentences[0]
        assert serve(on_disk(setup, root, number), model_dir) > 0, "an engine does not find its own records"
    assert len(_core.FsRoot(str(root)).stat()["namespaces"]) == len(numbers)
