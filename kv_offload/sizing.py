# SPDX-License-Identifier: Apache-2.0
"""The number of tokens of this model that fit in a number of bytes, and the startup summary."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kv_offload.config import OffloadConfig
from kv_offload.sizes import format_bytes

PAGE_BYTES = 4096  # shards are page-aligned; the header of a record is one page
GIB = 1 << 30


def tail_of_chunk(window: int, tokens_per_block: int, blocks_per_chunk: int) -> int:
    """Returns how many last blocks of a chunk a load reads if it ends with the chunk or one token before.

    ``window``: the sliding window in tokens. Returns 0 if the load reads all blocks.
    """
    head = max(0, tokens_per_block * blocks_per_chunk - window) // tokens_per_block
    return blocks_per_chunk - head if head else 0


@dataclass(frozen=True)
class GroupSize:
    """One KV cache group: tokens per chunk and the unpadded bytes of each of its shards."""

    tokens_per_chunk: int
    shard_bytes: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """Returns the padded bytes of a chunk in host memory, over all areas."""
        return sum(-(-size // PAGE_BYTES) * PAGE_BYTES for size in self.shard_bytes)

    @property
    def record_bytes(self) -> int:
        """Returns the bytes of a chunk on a tier, with its header."""
        return PAGE_BYTES + self.row_bytes


@dataclass(frozen=True)
class Geometry:
    """All groups of a model. A token counts if every group holds its part."""

    groups: tuple[GroupSize, ...]

    @classmethod
    def of(
        cls, tokens_per_chunk: Sequence[int], shard_bytes: Sequence[Sequence[int]], shards_per_area: int = 1
    ) -> "Geometry":
        """Converts the arguments of TieredCache: per group position, the tokens and the shard bytes per
        area."""
        pairs = zip(tokens_per_chunk, shard_bytes, strict=True)
        return cls(tuple(GroupSize(tokens, tuple(shards) * shards_per_area) for tokens, shards in pairs))

    @property
    def bytes_per_token(self) -> float:
        """Returns the KV bytes of one token, without padding."""
        return self._per_period([sum(group.shard_bytes) for group in self.groups])

    @property
    def largest_record_bytes(self) -> int:
        return max((group.record_bytes for group in self.groups), default=0)

    def tokens_in_memory(self, size: int) -> int:
        """Returns the whole tokens that fit in ``size`` bytes of host memory."""
        return self._tokens(size, [group.row_bytes for group in self.groups])

    def tokens_on_tier(self, size: int) -> int:
        """Returns the whole tokens that fit in ``size`` bytes of records, with headers."""
        return self._tokens(size, [group.record_bytes for group in self.groups])

    def tokens_by_tier(self, config: OffloadConfig, bounds: Sequence[int | None]) -> dict[str, int]:
        """Returns the whole tokens that fit in each tier, by name.

        ``bounds``: the limits of the tiers below cpu; tiers without one are left out.
        """
        tokens = {"cpu": self.tokens_in_memory(config.cpu_bytes_to_use)}
        return tokens | {
            name: self.tokens_on_tier(bound)
            for name, bound in zip(config.tier_names(), bounds, strict=True)
            if bound is not None
        }

    def _period(self) -> int:
        return math.lcm(*(group.tokens_per_chunk for group in self.groups))

    def _period_bytes(self, chunk_bytes: Sequence[int]) -> int:
        period = self._period()
        pairs = zip(self.groups, chunk_bytes, strict=True)
        return sum(size * (period // group.tokens_per_chunk) for group, size in pairs)

    def _per_period(self, chunk_bytes: Sequence[int]) -> float:
        return self._period_bytes(chunk_bytes) / self._period()

    def _tokens(self, size: int, chunk_bytes: Sequence[int]) -> int:
        needed = self._period_bytes(chunk_bytes)
        return size * self._period() // needed if needed else 0


def startup_summary(
    config: OffloadConfig,
    bounds: Sequence[int | None],
    geometry: Geometry,
    *,
    copier: str,
    namespace: str,
    version: str,
    replica: int = 0,
    replicas: int = 1,
) -> str:
    """Returns the startup summary: tiers, capacity in bytes and tokens, copier, namespace.

    ``bounds``: of each tier (machine.tier_bounds); ``copier``: RankWorker.describe() or its name. ``replica``
    of ``replicas``: with data parallelism every engine logs its own line with its own memory.
    """
    memory = config.cpu_bytes_to_use
    engine = f" engine {replica + 1} of {replicas}" if replicas > 1 else ""
    each, shared = (" for this engine", " for all engines") if replicas > 1 else ("", "")
    tiers = [f"cpu {format_bytes(memory)}{each} = {geometry.tokens_in_memory(memory):,} tokens"]
    for name, tier, bound in zip(config.tier_names(), config.secondary_tiers, bounds, strict=True):
        size = "limited by its server"
        if bound is not None:
            size = f"{format_bytes(bound)}{shared} = {geometry.tokens_on_tier(bound):,} tokens"
        tiers.append(f"{name} {tier.place} {size} ({', '.join(tier.traits())})")
    if (tenants := config.tenant_table()) is not None:
        shares = ", ".join(f"{name} {100 * share:g} %" for name, share in tenants.shares)
        tiers.append(f"tenants {shares}")
    per_token = format_bytes(round(geometry.bytes_per_token))
    return (
        f"kv-offload {version}{engine}: {'; '.join(tiers)}; {per_token} a token "
        f"({geometry.tokens_in_memory(GIB):,} tokens/GiB); copier {copier}; namespace {namespace}"
    )
