# SPDX-License-Identifier: Apache-2.0
"""Recorded agent sessions, and the trace of a closed loop that runs them.

The core merges the sessions (csrc/replay/agent_sessions.h): a fixed number of them is active, and the next
one begins when one ends. Requests take as long as recorded.
"""

import random
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from kv_offload._core import Trace as CoreTrace


@dataclass
class Sessions:
    """Sessions in the form of the core. Begin with ``begin``, then ``add`` requests in recorded order."""

    block_tokens: int = 0
    tokens: "array[int]" = field(default_factory=lambda: array("Q"))  # of each request's prompt
    _ends: "array[int]" = field(default_factory=lambda: array("I"))
    _streams: "array[int]" = field(default_factory=lambda: array("I"))
    _durations: "array[float]" = field(default_factory=lambda: array("d"))
    _pauses: "array[float]" = field(default_factory=lambda: array("d"))
    _common: "array[int]" = field(default_factory=lambda: array("I"))
    _new_ends: "array[int]" = field(default_factory=lambda: array("Q"))
    _new_blocks: "array[int]" = field(default_factory=lambda: array("Q"))
    _stream_ends: dict[int, float] = field(default_factory=dict)  # of the current session, in recorded time
    _last_begin: float = 0.0

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def requests(self) -> int:
        return len(self._streams)

    def begin(self) -> None:
        """Begins the next session."""
        self._ends.append(self.requests)
        self._stream_ends = {}
        self._last_begin = 0.0

    def add(
        self, time: float, stream: int, duration: float, tokens: int, common: int, new: Iterable[int]
    ) -> None:
        """Adds a request to the current session. ``time`` in seconds must not be less than before.

        ``common``: the first blocks of the prompt, the same as in the previous request of the stream.
        ``new``: the blocks after them; equal numbers must mean equal prefixes, in all sessions.
        """
        since = self._stream_ends.get(stream, self._last_begin)
        self._pauses.append(max(0.0, time - since))
        self._streams.append(stream)
        self._durations.append(duration)
        self._common.append(common)
        self._new_blocks.extend(new)
        self._new_ends.append(len(self._new_blocks))
        self.tokens.append(tokens)
        self._stream_ends[stream] = time + duration
        self._last_begin = time
        self._ends[-1] = self.requests

    def merge(
        self, *, active: int = 32, max_gap: float = 300, chunk_blocks: int = 8, seed: int | None = None
    ) -> "MergedTrace":
        """Returns the trace of a closed loop. Pauses longer than ``max_gap`` seconds are cut to that. With a
        seed, the sessions begin in a random order."""
        import numpy as np

        from kv_offload import _core

        order = list(range(len(self)))
        if seed is not None:
            random.Random(seed).shuffle(order)
        merged: dict[str, Any] = _core.merge_sessions(
            session_ends=np.array(self._ends, dtype=np.uint32),
            streams=np.array(self._streams, dtype=np.uint32),
            durations=np.array(self._durations),
            pauses=np.array(self._pauses),
            common=np.array(self._common, dtype=np.uint32),
            new_ends=np.array(self._new_ends, dtype=np.uint64),
            new_blocks=np.array(self._new_blocks, dtype=np.uint64),
            order=np.array(order, dtype=np.uint32),
            active=active,
            max_pause=max_gap,
            chunk_blocks=chunk_blocks,
        )
        return MergedTrace(
            core=merged["trace"],
            lengths=np.array(self.tokens, dtype=np.uint64)[merged["requests"]],
            ends=merged["ends"],
            returns_at=merged["returns_at"],
            needed=merged["needed_chunks"],
            unique=merged["different_chunks"],
            block_tokens=float(self.block_tokens * chunk_blocks),
            max_gap=max_gap,
        )


@dataclass(frozen=True)
class MergedTrace:
    """The requests of a closed loop in order. Its blocks are the chunks of the cache."""

    core: "CoreTrace"
    lengths: "npt.NDArray[np.uint64]"  # tokens of each prompt
    ends: "npt.NDArray[np.float64]"  # when each request ends, seconds
    returns_at: "npt.NDArray[np.float64]"  # begin of the next request of its stream; inf: there is none
    needed: float  # chunks in the prompts of the active sessions, averaged over the requests
    unique: int  # different chunks
    block_tokens: float
    max_gap: float

    @property
    def blocks(self) -> int:
        return self.core.blocks

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    def unique_blocks(self) -> int:
        return self.unique
