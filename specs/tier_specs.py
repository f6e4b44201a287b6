# SPDX-License-Identifier: Apache-2.0
"""The tiers of one host as the core opens them.

In an engine on several hosts, each host opens its own tiers: the scheduler knows the identity of the records
only when all ranks have published their layouts, so it sends a ``TierPlan`` to the other hosts.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from kv_offload.config import OffloadConfig
from kv_offload.namespace import NamespaceIdentity

if TYPE_CHECKING:
    from kv_offload._core import TierSpec

    from .bound_factors import HostFactors


def common_settings(options: OffloadConfig) -> dict[str, Any]:
    """Returns the settings that must be equal on all hosts of an engine, as JSON values. No secrets."""
    bounds = options.error_bounds()
    tenants = options.tenant_table()
    return {
        "list of tiers": [tier.type for tier in options.secondary_tiers],
        "encryption of tiers": [
            bool(getattr(tier, "encryption_key_file", ())) for tier in options.secondary_tiers
        ],
        "write_policy read_only of tiers": [
            tier.write_policy == "read_only" for tier in options.secondary_tiers
        ],
        "largest errors of lossy records": None if bounds is None else list(bounds),
        "list of tenants and shares": [] if tenants is None else [list(share) for share in tenants.shares],
        # Otherwise the records of a tenant would be under the key of the tier on some hosts.
        "encryption of tenants": [] if tenants is None else [bool(files) for files in tenants.key_files],
    }


@dataclass(frozen=True)
class TierPlan:
    """Values that the tiers of all hosts depend on, in addition to the settings."""

    identity: NamespaceIdentity  # of the whole engine
    elements: tuple[str, ...]  # by group position
    exact_groups: tuple[bool, ...]
    kv_runs: tuple[tuple[int, int], ...]  # (bytes of keys, bytes of values) by group position
    settings: dict[str, Any] = field(default_factory=dict)  # common_settings() of the scheduler's host

    def to_text(self) -> str:
        """Returns JSON for ``of_text``."""
        return json.dumps(
            {
                "identity": asdict(self.identity),
                "elements": self.elements,
                "exact_groups": self.exact_groups,
                "kv_runs": self.kv_runs,
                "settings": self.settings,
            }
        )

    @classmethod
    def of_text(cls, text: str) -> "TierPlan":
        """Raises ValueError for other texts."""
        try:
            plan: dict[str, Any] = json.loads(text)
            return cls(
                NamespaceIdentity.of_fields(plan["identity"]),
                tuple(plan["elements"]),
                tuple(plan["exact_groups"]),
                tuple((keys, values) for keys, values in plan["kv_runs"]),
                dict(plan["settings"]),
            )
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise ValueError(
                f"it cannot read the order of the scheduler's host ({type(error).__name__}: {error}): "
                "install the same release of vllm-kv-offload on all hosts"
            ) from error

    def refuse_other_settings(self, options: OffloadConfig) -> None:
        """Raises ValueError if this host's ``options`` differ from those of the scheduler's host."""
        ours = json.loads(json.dumps(common_settings(options)))
        different = [name for name, value in self.settings.items() if ours.get(name) != value]
        if different:
            texts = [
                f"its {name} is {ours.get(name)} and that of the scheduler's host is {self.settings[name]}"
                for name in different
            ]
            raise ValueError(f"{'; '.join(texts)}: start vLLM with the same settings on all hosts")

    def specs(
        self,
        options: OffloadConfig,
        bounds: Sequence[int | None],
        part: str = "",
        factors: "HostFactors | None" = None,
    ) -> "list[TierSpec]":
        """Returns the specs of the tiers. ``part``: which part of each chunk this host has; "": all of it.
        ``factors``: those of a calibration, for the shards of this host."""
        identity = self.identity.with_part(part)
        tiers = [
            tier.spec(name, bound, identity)
            for name, tier, bound in zip(options.tier_names(), options.secondary_tiers, bounds, strict=True)
        ]
        tenants = options.tenant_table()
        for tier in tiers:
            tier.elements = self.elements
            tier.exact_groups = self.exact_groups
            tier.kv_runs = self.kv_runs
            if factors is not None:
                tier.set_bound_factors(factors)
            tier.accepted_errors = options.error_bounds() or (0.0, 0.0)
            tier.tenant_key_files = [] if tenants is None else [list(paths) for paths in tenants.key_files]
            tier.memory_outlives = options.keep_host_memory
        return tiers
