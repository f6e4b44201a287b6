# SPDX-License-Identifier: Apache-2.0
"""Watches that log once: no hits at all; a cache reset; a reset of one replica only. Also codec decisions."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kv_offload.log import get_logger

if TYPE_CHECKING:
    from kv_offload._core import HostLinks, Metrics, TieredCache

logger = get_logger(__name__)

_CHECK_SECONDS = 30.0
_NEIGHBOURS_SECONDS = 120.0  # replicas start at different times
_MIN_EVICTED_TOKENS = 100_000  # missed tokens that had been stored before
_MIN_MISSED_TOKENS = 1_000_000  # missed tokens, for any reason
_REASONS = {
    "not_stored": "the requested prompts were never stored: no prompt shares a prefix of a whole chunk with "
    "an earlier one, or cache_salt, LoRA adapter or images differ",
    "evicted": "chunks are evicted before they are requested again: raise cpu_bytes_to_use or max_bytes",
    "recompute_cheaper": "computing was always estimated to be faster than loading: the tier is slow, see "
    "kv_offload_read_seconds; load_policy always loads anyway",
    "deadline": "reads take longer than lookup_timeout_ms: the tier is slow or stuck",
    "corrupt": "records failed their checksums: run kv-offload verify on the root",
    "incomplete": "vLLM offers chunks without some of their blocks: lower blocks_per_chunk until a chunk is "
    "not longer than the sliding window",
    "io_error": "the tier's records cannot be read: see kv_offload_failures_total",
    "pressure": "host memory has no space for the chunks to read: raise cpu_bytes_to_use",
    "host_lost": "a host of this engine's ranks is not connected: see the log and kv_offload_lost_hosts",
    "disabled": "loading is disabled by load_policy never, or by requests (kv_offload_load_policy, "
    "kv_offload_skip_load or kv_load_tiers in kv_transfer_params)",
}


@dataclass(frozen=True)
class Surroundings:
    """Possible causes of misses that are known at start."""

    random_seed: str = ""  # the hash algorithm, if each process draws its own seed; otherwise ""
    other_namespaces: tuple[str, ...] = ()  # how each other namespace in the tiers differs
    group_ids: tuple[int, ...] = ()  # vLLM's group IDs, by position
    capacity_tokens: int = 0  # of host memory and all tiers; 0: unknown
    write_policies: tuple[str, ...] = ()  # of each tier


class HostWatch:
    """Logs lost hosts of this engine's ranks, and reports them in metrics."""

    def __init__(self, links: "HostLinks", metrics: "Metrics") -> None:
        self._links = links
        self._metrics = metrics

    def poll(self) -> bool:
        """Logs each host that was lost or came back since the last call. Returns True if none is lost."""
        for event in self._links.take_events():
            logger.warning("%s", event)
        lost = self._links.lost_hosts
        self._metrics.set("kv_offload_lost_hosts", (), len(lost))
        for host in range(self._links.num_hosts + 1):  # 0: this one
            self._metrics.set("kv_offload_host_connected", (str(host),), host not in lost)
        return not lost

    def close(self) -> None:
        """Closes the connections. Idempotent."""
        self._links.close()


class NeighbourWatch:
    """Logs which neighbours are not used (share_host_memory), and once if this server finds none at all."""

    def __init__(self, cache: "TieredCache", expects_any: bool) -> None:
        """``expects_any``: other replicas should run on this host: finding none is a warning."""
        self._cache = cache
        self._level = logging.WARNING if expects_any else logging.INFO
        self._missing = True
        self._count = 0
        self._since: float | None = None

    def poll(self, now: float) -> None:
        """Logs new problems and changes of the number of neighbours. ``now``: seconds."""
        for problem in self._cache.take_neighbour_problems():
            logger.warning("share_host_memory: %s", problem)
        count = self._cache.stats()["neighbours"]
        if count != self._count:
            logger.info("share_host_memory: %d other engines of this host are read", count)
            self._count = count
        self._missing = self._missing and count == 0
        if self._since is None:
            self._since = now
        if self._missing and now - self._since >= _NEIGHBOURS_SECONDS:
            self._missing = False
            logger.log(
                self._level,
                "share_host_memory: this server found no other one in /dev/shm. Servers in other "
                "containers are found only if these share /dev/shm (docker run --ipc, or one tmpfs "
                "mounted in all), and servers on other hosts never",
            )


class DivergenceWatch:
    """Checks whether the replicas on a tier still share its records; warns once per tier."""

    def __init__(self, cache: "TieredCache", tiers: Sequence[str]) -> None:
        """``tiers``: the tier names, in the cache's order."""
        self._cache = cache
        self._unwarned = dict(enumerate(tiers))

    def poll(self) -> None:
        """Checks each tier without a warning so far."""
        for position, name in list(self._unwarned.items()):
            if self._cache.tier_stats(position)["diverged"]:
                del self._unwarned[position]
                logger.warning(
                    "tier %s: another replica that shares it was reset and this one was not. Each "
                    "continues with separate records, as their weights may differ by now. Reset this one "
                    "too if its weights changed (POST /reset_prefix_cache?reset_external=true); they share "
                    "records again after a restart",
                    name,
                )


class ResetWatch:
    """Reports vLLM's first cache reset: the invalidated chunks and tiers, and how to keep the cache."""

    def __init__(self, cache: "TieredCache", tiers: Sequence[str]) -> None:
        """``tiers``: the tier names, in the cache's order."""
        self._cache = cache
        self._tiers = tiers
        self._reported = False

    def report_forgotten(self) -> None:
        """Warns once. Call it before a reset; it does nothing if no chunk or tier is affected."""
        chunks = self._cache.stats()["resident_chunks"]
        if self._reported or not (chunks or self._tiers):
            return
        self._reported = True
        records = f" and all records of {', '.join(self._tiers)}" if self._tiers else ""
        logger.warning(
            "vLLM reset the KV cache: %d chunks in host memory%s are now invalid. Sleep (level 1, 2), "
            "pause and POST /reset_prefix_cache?reset_external=true ask for this, because the weights may "
            "change next. If the weights of this server never change in place, keep the cache with "
            '"fixed_weights": true. This warning is logged once',
            chunks,
            records,
        )

    def report_kept(self) -> None:
        """Logs once that a reset keeps the cache."""
        if self._reported:
            return
        self._reported = True
        logger.info(
            "vLLM asked to reset the KV cache: %d chunks in host memory and all tiers are kept "
            "(fixed_weights)",
            self._cache.stats()["resident_chunks"],
        )


class RemovalsWatch:
    """Warns if a tier's server does not report removals, which KV events need: once for each reason."""

    def __init__(self, cache: "TieredCache", tiers: Sequence[str]) -> None:
        """``tiers``: the tier names, in the cache's order."""
        self._cache = cache
        self._tiers = tuple(tiers)
        self._warned: set[tuple[int, str]] = set()

    def poll(self) -> None:
        """Checks each tier."""
        for position, name in enumerate(self._tiers):
            problem = self._cache.tier_stats(position)["removals_problem"]
            if problem and (position, problem) not in self._warned:
                self._warned.add((position, problem))
                logger.warning(
                    "tier %s: the server does not report removed records: %s. KV events publish such a "
                    "removal when a read finds the record missing",
                    name,
                    problem,
                )


class CodecWatch:
    """Logs each change of the decision whether a tier's records are encoded."""

    def __init__(self, cache: "TieredCache", tiers: Sequence[str]) -> None:
        """``tiers``: the tier names, in the cache's order."""
        self._cache = cache
        self._encodes = dict.fromkeys(range(len(tiers)), False)
        self._tiers = tiers

    def poll(self) -> None:
        """Checks each tier."""
        for position, before in self._encodes.items():
            now = self._cache.tier_stats(position)
            if now["encodes"] != before:
                self._encodes[position] = now["encodes"]
                logger.info("tier %s: compression is %s", self._tiers[position], now["codec_reason"])


class HitWatch:
    """Checks the counters every 30 s and warns once if there are no hits."""

    def __init__(
        self,
        metrics: "Metrics",
        tiers: Sequence[str],
        cache: "TieredCache | None" = None,
        surroundings: Surroundings | None = None,
    ) -> None:
        """``tiers``: every label that a hit can have. ``cache``: source of the lookup counts, if given."""
        self._metrics = metrics
        self._tiers = tiers
        self._cache = cache
        self._surroundings = surroundings or Surroundings()
        self._next_poll = 0.0
        self._done = False

    def poll(self, now: float) -> None:
        """Warns if chunks are stored, but none was hit despite many lookups.

        "Many" is 100,000 missed tokens that had been stored before, or 1,000,000 missed tokens in total.
        ``now``: seconds of any monotonic clock.
        """
        if self._done or now < self._next_poll:
            return
        self._next_poll = now + _CHECK_SECONDS
        if any(self._metrics.value("kv_offload_hit_tokens_total", (tier,)) for tier in self._tiers):
            self._done = True
            return
        misses = {
            reason: self._metrics.value("kv_offload_miss_tokens_total", (reason,)) for reason in _REASONS
        }
        asked = sum(misses.values())
        stored_before = asked - misses["not_stored"]
        if stored_before < _MIN_EVICTED_TOKENS and asked < _MIN_MISSED_TOKENS:
            return
        if not any(self._metrics.value("kv_offload_tier_chunks", (tier,)) for tier in self._tiers):
            return
        self._done = True
        reason = max(misses, key=lambda name: misses[name])
        logger.warning(
            "KV chunks are stored, but none was ever hit: of %d tokens looked up, %d missed (%s): %s",
            asked,
            misses[reason],
            reason,
            self._cause(reason, misses),
        )

    def _cause(self, reason: str, misses: Mapping[str, float]) -> str:
        """Returns the most specific matching cause; otherwise the meaning of the most frequent reason."""
        # From the causes that exclude every hit to the general ones.
        around = self._surroundings
        veto = self._vetoing_groups()
        if veto:
            return veto
        longest = self._cache.stats()["longest_prompt"] if self._cache is not None else 0
        if reason in ("evicted", "pressure", "not_stored") and 0 < around.capacity_tokens < longest:
            return (
                f"a prompt has up to {longest:,} tokens, and host memory and tiers together hold "
                f"{around.capacity_tokens:,}: no prompt fits; raise cpu_bytes_to_use or max_bytes"
            )
        if reason != "not_stored":
            return _REASONS[reason]
        if around.random_seed and around.write_policies:
            return (
                f"the hash algorithm {around.random_seed} draws a new random seed in each process, so that "
                "no record from before a restart or from another server is ever found: set PYTHONHASHSEED to "
                "the same value everywhere, or use sha256"
            )
        if around.other_namespaces:
            return (
                "the records there belong to other namespaces, which differ from this server's in "
                + "; or in ".join(around.other_namespaces)
            )
        reuse = [policy for policy in around.write_policies if policy.startswith("reuse:")]
        if reuse and misses["evicted"] > 0:
            return (
                f"write_policy {reuse[0]} writes only chunks that were requested that many times while in "
                "host memory, and they are evicted earlier: raise cpu_bytes_to_use, or use write_through"
            )
        return _REASONS[reason]

    def _vetoing_groups(self) -> str:
        """Returns a text on groups without hits while other groups have hits; "" if there are none.

        A hit needs chunks of all groups.
        """
        lookups = self._cache.lookup_counts() if self._cache is not None else []
        ids = self._surroundings.group_ids or tuple(range(len(lookups)))
        found = [str(ids[position]) for position, (hits, _) in enumerate(lookups) if hits]
        never = [str(ids[position]) for position, (hits, misses) in enumerate(lookups) if misses and not hits]
        if not found or not never:
            return ""
        return (
            f"chunks of cache group {', '.join(found)} are found, but none of group {', '.join(never)}, and "
            "a hit needs all groups: that group's windows are not stored or are evicted first (see "
            "blocks_per_chunk and cpu_bytes_to_use)"
        )
