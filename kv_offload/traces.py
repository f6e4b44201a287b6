# SPDX-License-Identifier: Apache-2.0
"""Request traces: one JSON object per line, in the format of the Mooncake traces.

``hash_ids``: numbers of the prompt's blocks, in order; equal numbers mean equal prefixes. ``input_length``:
tokens of the prompt. ``timestamp`` and ``output_length`` are optional and unused.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from kv_offload._core import Trace as CoreTrace
    from kv_offload.replay.sessions import MergedTrace

OPTIMUM = "optimum"  # knows the future


@dataclass
class Trace:
    """Prompts in order of arrival."""

    prompts: list[list[int]] = field(default_factory=list)
    tokens: int = 0
    lengths: list[int] = field(default_factory=list)  # tokens of each prompt; empty if unknown

    @property
    def blocks(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def block_tokens(self) -> float:
        """Average tokens per block; 1 if the lengths are unknown."""
        return self.tokens / self.blocks if self.tokens and self.blocks else 1.0

    def unique_blocks(self) -> int:
        return len({block for prompt in self.prompts for block in prompt})

    def to_core(self) -> "CoreTrace":
        import numpy as np

        from kv_offload import _core

        ends = np.cumsum([len(prompt) for prompt in self.prompts], dtype=np.uint32)
        return _core.Trace(ends, np.array([block for p in self.prompts for block in p], dtype=np.uint64))


def read_trace(path: Path, limit: int | None = None) -> Trace:
    """Reads the first ``limit`` requests of a trace, or all. Raises ValueError naming an invalid line."""
    trace = Trace()
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if limit is not None and len(trace.prompts) >= limit:
                break
            if not line.strip():
                continue
            prompt, tokens = _request(line, f"{path}:{number}")
            trace.prompts.append(prompt)
            trace.tokens += tokens
            trace.lengths.append(tokens)
    if not trace.prompts:
        raise ValueError(f"{path} has no request; write one JSON object a line: " + _EXAMPLE)
    return trace


_EXAMPLE = '{"input_length": 1024, "hash_ids": [0, 1]}'


def _request(line: str, where: str) -> tuple[list[int], int]:
    try:
        request = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON ({error}); write {_EXAMPLE}") from error
    blocks = request.get("hash_ids") if isinstance(request, dict) else None
    if not isinstance(blocks, list) or not all(type(b) is int and 0 <= b < 2**64 for b in blocks):
        raise ValueError(f"{where} has no hash_ids (a list of integers from 0); write {_EXAMPLE}")
    tokens = request.get("input_length", 0)
    if not isinstance(tokens, int) or tokens < 0:
        raise ValueError(f"{where} has an input_length of {tokens!r}; give the tokens of the prompt")
    return blocks, tokens


_COUNTS = (
    "host_hits",
    "tier_hits",
    "stored",
    "written",
    "declined",
    "tier_declined",
    "tier_evicted",
    "prefetched",
    "prefetched_used",
)
_KILL_COUNTS = ("killed_with", "recent_blocks", "recent_hits", "blocks_after", "hits_after")


@dataclass(frozen=True)
class Setting:
    """The parameters of one replay. Capacities are in blocks of the trace."""

    policy: str
    host_blocks: int
    tier_blocks: int = 0
    tier_policy: str = "prefix"
    write_policy: str = "write_through"
    kill_after: int = 0  # requests; 0: no kill
    recent: int = 50  # requests before the kill
    keep_host_memory: bool = False  # host memory survives the kill
    prefetch: bool = True  # of prompts that a hint expects back, from the tier


@dataclass(frozen=True)
class Speeds:
    """The speeds and bytes of a token, as far as they are known."""

    prefill: float = 10_000  # tokens/s
    token_bytes: int = 0  # of KV cache; 0: not known, loads take no time
    load: float = 10 << 30  # bytes/s from host memory to the GPU
    disk: float = 2 << 30  # bytes/s from the disk to host memory


def replay(
    core: "CoreTrace",
    trace: "Trace | MergedTrace",
    setting: Setting,
    speeds: Speeds,
    hints: "npt.NDArray[np.float64] | None" = None,
    late_hints: bool = False,
) -> dict[str, Any]:
    """Returns the hits with ``setting`` in blocks, tokens and saved prefill seconds, the bytes moved and the
    estimated TTFT. ``hints``: one per request, see ``kv_offload.replay.hints``.

    With a kill also: ``killed_with`` records on the tier; ``recent_hits`` of the ``recent_blocks`` of the
    last prompts before the kill, looked up after it; ``hits_after`` of the ``blocks_after`` the kill.
    """
    found: dict[str, Any]
    if setting.policy == OPTIMUM:
        hits = core.optimal_hits(setting.host_blocks + setting.tier_blocks)
        found = {name: None for name in (*_COUNTS, *_KILL_COUNTS, *_TTFT_PERCENTILES)} | {
            "host_hits": hits,
            "tier_hits": 0,
            "declined": 0,
        }
    else:
        result = core.replay(
            host_chunks=setting.host_blocks,
            tier_chunks=setting.tier_blocks,
            eviction_policy=setting.policy,
            tier_eviction_policy=setting.tier_policy,
            write_policy=setting.write_policy,
            kill_after=setting.kill_after,
            recent_requests=setting.recent,
            keep_host_memory=setting.keep_host_memory,
            hints=hints,
            late_hints=late_hints,
            prefetch=setting.prefetch,
            tier_chunks_per_second=speeds.disk / (trace.block_tokens * speeds.token_bytes)
            if speeds.token_bytes
            else 0.0,
        )
        hits = result["host_hits"] + result["tier_hits"]
        found = {name: result[name] for name in _COUNTS}
        found |= {name: result[name] if setting.kill_after else None for name in _KILL_COUNTS}
        found |= _first_tokens(result, trace, speeds)
    tokens = hits * trace.block_tokens
    return {
        "policy": setting.policy,
        "tier_policy": setting.tier_policy if setting.tier_blocks else None,
        "host_blocks": setting.host_blocks,
        "tier_blocks": setting.tier_blocks,
        "hit_blocks": hits,
        "hit_ratio": hits / trace.blocks if trace.blocks else 0.0,
        "hit_tokens": round(tokens),
        "saved_prefill_seconds": tokens / speeds.prefill,
        **found,
        **_moved(found, hits, trace.block_tokens * speeds.token_bytes),
    }


_TTFT_PERCENTILES = ("ttft_p50_seconds", "ttft_p95_seconds")


def _first_tokens(
    result: dict[str, Any], trace: "Trace | MergedTrace", speeds: Speeds
) -> dict[str, float | None]:
    """Returns the estimated TTFT: hits are loaded, then the rest of the prompt is computed. No request waits
    for another one."""
    import numpy as np

    lengths = np.asarray(trace.lengths, dtype=np.float64)
    if not lengths.any():
        return dict.fromkeys(_TTFT_PERCENTILES)
    host = result["host_hits_of"] * trace.block_tokens
    tier = result["tier_hits_of"] * trace.block_tokens
    seconds = (host + tier) * (speeds.token_bytes / speeds.load) + tier * (speeds.token_bytes / speeds.disk)
    seconds += np.maximum(lengths - host - tier, 0) / speeds.prefill
    return dict(zip(_TTFT_PERCENTILES, map(float, np.percentile(seconds, (50, 95))), strict=True))


def _moved(found: dict[str, Any], hits: int, block_bytes: float) -> dict[str, int | None]:
    """Returns the bytes that move: to the GPU, to host memory, and from and to the tier."""
    counts = {
        "loaded": hits,
        "stored": found["stored"],
        "read": found["tier_hits"],
        "written": found["written"],
    }
    return {
        f"{name}_bytes": None if count is None or not block_bytes else round(count * block_bytes)
        for name, count in counts.items()
    }
