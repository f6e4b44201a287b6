# SPDX-License-Identifier: Apache-2.0
"""Simulated hints about the return of a session, carried by each request.

A hint is the expected time of the next request, as eviction policies read it: seconds on the clock of the
trace, infinity for "it does not return", 0 for "unknown".
"""

from typing import TYPE_CHECKING

from kv_offload.replay.sessions import MergedTrace

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

NONE, ONE_BIT, EXACT = HINTS = ("none", "one-bit", "exact")
SOON_SECONDS = 30.0  # what the one bit means


def simulated_hints(
    trace: MergedTrace, kind: str, wrong: float = 0.0, seed: int = 0
) -> "npt.NDArray[np.float64] | None":
    """Returns a hint per request; None for ``none``.

    ``exact``: the time of the next request. ``one-bit``: "within 30 s" becomes the end of the request plus
    30 s, "later or never" becomes the end plus the longest gap. ``wrong``: the share of hints that are wrong:
    the opposite bit, or the gap after a random request.
    """
    import numpy as np

    if kind == NONE:
        return None
    gaps = trace.returns_at - trace.ends
    random = np.random.default_rng(seed)
    is_wrong = random.random(len(gaps)) < wrong
    if kind == EXACT:
        told = np.where(is_wrong, gaps[random.integers(len(gaps), size=len(gaps))], gaps)
    else:
        is_soon = (gaps <= SOON_SECONDS) ^ is_wrong
        told = np.where(is_soon, SOON_SECONDS, max(trace.max_gap, SOON_SECONDS))
    hints: npt.NDArray[np.float64] = np.maximum(trace.ends + told, np.nextafter(0, 1))  # 0: unknown
    return hints
