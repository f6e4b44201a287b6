"""The one warning when much is stored and nothing is ever hit."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kv_offload.log import get_logger

if TYPE_CHECKING:
    from kv_offload._core import Metrics

logger = get_logger(__name__)

_LOOK_SECONDS = 30.0
_ENOUGH_STORED = 100_000  # tokens missed though they had been stored once
_ENOUGH_ASKED = 1_000_000  # tokens missed, whatever the reason
_REASONS = {
    "not_stored": "the prompts asked for were never stored: no prompt shares a prefix of a whole chunk with "
    "an earlier one, or what makes prefixes equal differs (cache_salt, LoRA, images)",
    "evicted": "chunks are evicted before they are asked for again: raise cpu_bytes_to_use or max_bytes",
    "recompute_cheaper": "computing was always estimated to be faster than loading: the tier is slow, see "
    "kv_offload_read_seconds; load_policy always loads anyway",
    "deadline": "reads take longer than lookup_deadline_ms: the tier is slow or stuck",
    "corrupt": "records do not verify: run kv-offload verify on the root",
    "io_error": "the tier's records cannot be read: see kv_offload_failures_total",
    "pressure": "host memory has no room for what is read: raise cpu_bytes_to_use",
    "disabled": "requests forbid loading (kv_load_tiers, load_policy never), or the tier is off",
}


class HitWatch:
    """Looks at the counters now and then, and warns once."""

    def __init__(self, metrics: "Metrics", tiers: Sequence[str]) -> None:
        """``tiers``: every label that a hit can have."""
        self._metrics = metrics
        self._tiers = tiers
        self._next_look = 0.0
        self._done = False

    def look(self, now: float) -> None:
        """Warn when chunks are stored, much was asked for (100,000 tokens that had been stored, or a million
        that had not) and nothing was hit. ``now`` in seconds of any steady clock."""
        if self._done or now < self._next_look:
            return
        self._next_look = now + _LOOK_SECONDS
        if any(self._metrics.value("kv_offload_hit_tokens_total", (tier,)) for tier in self._tiers):
            self._done = True
            return
        misses = {
            reason: self._metrics.value("kv_offload_miss_tokens_total", (reason,)) for reason in _REASONS
        }
        asked = sum(misses.values())
        had_been_stored = asked - misses["not_stored"]
        if had_been_stored < _ENOUGH_STORED and asked < _ENOUGH_ASKED:
            return
        if not any(self._metrics.value("kv_offload_tier_chunks", (tier,)) for tier in self._tiers):
            return
        self._done = True
        reason = max(misses, key=lambda name: misses[name])
        logger.warning(
            "KV chunks are stored, but none was ever hit: of %d tokens asked for, %d missed (%s): %s",
            asked,
            misses[reason],
            reason,
            _REASONS[reason],
        )
