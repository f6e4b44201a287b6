# SPDX-License-Identifier: Apache-2.0
"""Run by test_contract.py under each vLLM release: logs about chunks longer than a window."""

import logging

import adapter
import pytest

adapter.use_specs()

from kv_offload.specs.windows import Windows, log_long_chunks  # noqa: E402

from contract.parts import TOKENS_PER_BLOCK, offloading_config  # noqa: E402

BLOCKS = 16
CHUNK = BLOCKS * TOKENS_PER_BLOCK


@pytest.mark.parametrize(
    ("window", "tail", "level", "says"),
    [
        (128, 8, logging.INFO, "longer than the sliding window of 128, so the last 8 of 16 blocks"),
        (128, 0, logging.WARNING, "set blocks_per_chunk to at most 8"),
        (TOKENS_PER_BLOCK - 1, 0, logging.WARNING, "set blocks_per_chunk to at most 1"),
        (CHUNK, 0, None, ""),
        (CHUNK - TOKENS_PER_BLOCK + 1, 0, None, ""),  # a load reads a part of the first block
        (None, 0, None, ""),
    ],
    ids=["stored by their ends", "refused", "shorter than a block", "as long", "nearly as long", "none"],
)
def test_only_chunks_that_are_longer_by_whole_blocks_are_logged(
    window: int | None, tail: int, level: int | None, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = offloading_config(groups=2, blocks_per_chunk=BLOCKS)
    with caplog.at_level(logging.INFO, logger="vllm.kv_offload"):
        log_long_chunks(config, Windows((None, window), (0, tail)))
    assert [record.levelno for record in caplog.records] == ([] if level is None else [level])
    assert all(says in line and "cache group 4 (layer.1" in line for line in caplog.messages)
