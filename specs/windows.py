# SPDX-License-Identifier: Apache-2.0
"""The stored blocks of a chunk in sliding-window groups, and their log lines at start.

vLLM frees blocks before the window. When a conversation continues, it therefore offers a chunk longer than
the window without its leading blocks. A load ends at the end of a chunk (or one token before, if the prompt
ends there), so it reads only the last blocks of a chunk. Rows of such a group hold only these blocks, and
chunks without their leading blocks are stored like all others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kv_offload.log import get_logger
from kv_offload.sizing import tail_of_chunk

from . import compat

logger = get_logger(__name__)


@dataclass(frozen=True)
class Windows:
    """The windows per group position, determined in the workers."""

    tokens: tuple[int | None, ...]  # kept by vLLM before a position; None: all, a state, or unknown
    tail_blocks: tuple[int, ...]  # of a chunk that a row holds; 0: all


def windows_of(config: Any) -> Windows:
    """Returns the windows of this engine's cache groups. ``config``: the OffloadingConfig.

    If a layer is unknown, or a load may end inside a chunk, rows hold whole chunks.
    """
    number = len(config.groups)
    nothing = Windows((None,) * number, (0,) * number)
    vllm_config = compat.current_vllm_config()
    if vllm_config is None:
        return nothing
    try:
        known = vllm_config.compilation_config.static_forward_context
        tokens = tuple(_window(group, known, vllm_config) for group in config.groups)
        offloaded = {name for group in config.groups for name in group.layer_names}
        if compat.loads_end_anywhere(known, offloaded, vllm_config):
            return Windows(tokens, nothing.tail_blocks)
        drops = [compat.group_drops_blocks(group, vllm_config) for group in config.groups]
    except Exception as error:  # an unknown kind of layer uses whole chunks
        logger.debug("which cache groups have a sliding window is not known: %s", error)
        return nothing
    tails = (_tail(config, tokens, position) if drops[position] else 0 for position in range(number))
    return Windows(tokens, tuple(tails))


def _window(group: Any, known: Mapping[str, Any], vllm_config: Any) -> int | None:
    windows = {compat.layer_window(known[name], vllm_config) for name in group.layer_names if name in known}
    found = [window for window in windows if window is not None]
    return max(found) if found and len(found) == len(windows) else None


def _tail(config: Any, tokens: Sequence[int | None], position: int) -> int:
    window, group = tokens[position], config.groups[position]
    # A load may end where a chunk of any group ends.
    if window is None or any(other.tokens_per_block % group.tokens_per_block for other in config.groups):
        return 0
    return tail_of_chunk(window, group.tokens_per_block, config.cache.blocks_per_chunk)


def log_long_chunks(config: Any, windows: Windows) -> None:
    """Logs each group whose chunks exceed its window by whole blocks; a warning if conversations lose
    hits."""
    for group, window, tail in zip(config.groups, windows.tokens, windows.tail_blocks, strict=True):
        blocks = config.cache.blocks_per_chunk
        chunk = group.tokens_per_block * blocks
        # An excess below one block has no effect: a load then reads part of the chunk's first block too.
        if window is None or not tail_of_chunk(window, group.tokens_per_block, blocks):
            continue
        layers = (
            f"cache group {group.group_id} ({group.layer_names[0]} and {len(group.layer_names) - 1} more)"
        )
        if tail:
            logger.info(
                "%s: chunks of %d tokens are longer than the sliding window of %d, so the last %d of %d "
                "blocks of each are stored",
                layers,
                chunk,
                window,
                tail,
                blocks,
            )
        else:
            logger.warning(
                "%s: chunks of %d tokens are longer than the sliding window of %d, and loads of this model "
                "may end inside a chunk. Chunks that vLLM offers without their first blocks are not stored, "
                "so conversations are rarely found; set blocks_per_chunk to at most %d",
                layers,
                chunk,
                window,
                max(1, window // group.tokens_per_block),
            )
