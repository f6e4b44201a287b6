# SPDX-License-Identifier: Apache-2.0
"""The tiers of one host as the core opens them.

In an engine on several hosts, each host opens its own tiers: the scheduler knows the identity of the records
only when all ranks have published their layouts, so it sends a ``TierPlan`` to the other hosts.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kv_offload.config import OffloadConfig
from kv_offload.namespace import NamespaceIdentity

if TYPE_CHECKING:
    from kv_offload._core import TierSpec


@dataclass(frozen=True)
class TierPlan:
    """What the tiers of all hosts depend on, in addition to the settings."""

    identity: NamespaceIdentity  # of the whole engine
    elements: tuple[str, ...]  # by group position
    exact_groups: tuple[bool, ...]

    def to_text(self) -> str:
        """Returns JSON for ``of_text``."""
        return json.dumps(
            {
                "identity": asdict(self.identity),
                "elements": self.elements,
                "exact_groups": self.exact_groups,
            }
        )

    @classmethod
    def of_text(cls, text: str) -> "TierPlan":
        """Raises ValueError, TypeError or KeyError for other texts."""
        plan: dict[str, Any] = json.loads(text)
        return cls(
            NamespaceIdentity.of_fields(plan["identity"]),
            tuple(plan["elements"]),
            tuple(plan["exact_groups"]),
        )

    def specs(self, options: OffloadConfig, bounds: Sequence[int | None], part: str = "") -> "list[TierSpec]":
        """Returns the specs of the tiers. ``part``: which part of each chunk this host has; "": all of it."""
        identity = self.identity.with_part(part)
        tiers = [
            tier.spec(name, bound, identity)
            for name, tier, bound in zip(options.tier_names(), options.secondary_tiers, bounds, strict=True)
        ]
        tenants = options.tenant_table()
        for tier in tiers:
            tier.elements = self.elements
            tier.exact_groups = self.exact_groups
            tier.accepted_error = options.max_error()
            tier.tenant_key_files = [] if tenants is None else [list(paths) for paths in tenants.key_files]
            tier.memory_outlives = options.keep_host_memory
        return tiers
