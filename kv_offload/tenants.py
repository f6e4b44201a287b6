# SPDX-License-Identifier: Apache-2.0
"""The tenants of an engine: their shares, and how a request's tenant is recognised.

Importing this module loads neither the C++ core nor vLLM.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from kv_offload.hints import KEY as HINTS_KEY
from kv_offload.tiers.encryption import KeyFiles

OTHER = "other"  # the tenant of all requests that belong to no configured one; its number is 0
MAX_TENANTS = 31
NAME_PATTERN = r"^[A-Za-z0-9_.-]{1,64}$"  # also the value of a metric label

Recognised = Annotated[str, Field(min_length=1, max_length=256)]


class TenantConfig(BaseModel):
    """One entry of ``tenants``."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    share: float = Field(
        ge=0,
        le=100,
        description="guaranteed part of host memory, of each directory and of each tier's bandwidth, in "
        "percent. Idle shares are lent",
    )
    cache_salts: tuple[Recognised, ...] = Field(
        default=(), strict=False, description="requests with one of these values of vLLM's cache_salt"
    )
    clients: tuple[Recognised, ...] = Field(
        default=(),
        strict=False,
        description="requests with one of these names as the client of their kv_offload_hints. Default, if "
        "cache_salts is not set either: the tenant's name",
    )
    encryption_key_file: KeyFiles = Field(
        default=None,
        strict=False,
        description="file with 32 random bytes, or a list of such files, as for a tier. Encrypts the records "
        "of the tenant on all tiers. Each tier needs another key for the other records",
    )


def tenant_problems(tenants: Mapping[str, TenantConfig]) -> list[str]:
    """Returns what is wrong with the tenants as a whole. Does not show any cache_salt: it may be a secret."""
    problems = []
    if OTHER in tenants:
        problems.append(f"{OTHER} is the name of the tenant of all other requests; its share is the rest")
    total = sum(tenant.share for tenant in tenants.values())
    if total > 100 + 1e-9:
        shares = ", ".join(f"{name} {tenant.share:g}" for name, tenant in tenants.items())
        problems.append(f"the shares are {total:g} % together ({shares}); at most 100 % are possible")
    return problems + TenantTable(tenants).duplicates


def key_problems(tenants: Mapping[str, TenantConfig], encrypted: Sequence[bool]) -> list[str]:
    """Returns why the keys of tenants cannot be used. ``encrypted``: whether each tier has a key."""
    own = [name for name, tenant in tenants.items() if tenant.encryption_key_file]
    if not own or all(encrypted):
        return []
    plain = ", ".join(f"secondary_tiers[{i}]" for i, has_key in enumerate(encrypted) if not has_key)
    return [
        f"{', '.join(own)}: encryption_key_file of a tenant needs an encryption_key_file in each tier, and "
        f"{plain} has none; add one, or remove that of the tenant"
    ]


class TenantTable:
    """Maps requests to numbers of tenants: 0 is ``other``, then the order of the configuration."""

    def __init__(self, tenants: Mapping[str, TenantConfig]) -> None:
        self.names = (OTHER, *tenants)
        rest = max(0.0, 100.0 - sum(tenant.share for tenant in tenants.values()))
        percent = (rest, *(tenant.share for tenant in tenants.values()))
        # Files of each tenant's own keys, by number.
        self.key_files = ((), *(tenant.encryption_key_file or () for tenant in tenants.values()))
        self.shares = tuple((name, share / 100) for name, share in zip(self.names, percent, strict=True))
        self.duplicates: list[str] = []  # values of several tenants; the first one keeps them
        self._by_salt: dict[str, int] = {}
        self._by_client: dict[str, int] = {}
        for number, (name, tenant) in enumerate(tenants.items(), 1):
            clients = tenant.clients or (() if tenant.cache_salts else (name,))
            for kind, values, table in (
                ("cache_salts", tenant.cache_salts, self._by_salt),
                ("clients", clients, self._by_client),
            ):
                for position, value in enumerate(values):
                    first = table.setdefault(value, number)
                    if first != number or value in values[:position]:
                        shown = f" ({value})" if kind == "clients" else ""
                        self.duplicates.append(
                            f"{name}.{kind}[{position}]{shown} is also one of {self.names[first]}; "
                            "each value can belong to one tenant only"
                        )

    @property
    def uses_salts(self) -> bool:
        return bool(self._by_salt)

    def number_of(self, cache_salt: str | None, client: str | None) -> int:
        """Returns the number of a request's tenant. The salt takes precedence over the client."""
        if cache_salt is not None and (number := self._by_salt.get(cache_salt)) is not None:
            return number
        return 0 if client is None else self._by_client.get(client, 0)


def stored_name(tenant: str) -> str:
    """Returns the name that records of a tenant have in their header; "" for ``other``."""
    return "" if tenant == OTHER else tenant


def unknown_tenant(record: str) -> str:
    """Returns why the tenant of a record is not known, and the remedy. ``record``: its path."""
    return f"{record} has no valid header: kv-offload verify --repair removes damaged records"


class TenantTotals:
    """Sums of records by the tenant that their headers name."""

    def __init__(self) -> None:
        self._found: dict[str, dict[str, int]] = {}

    def add(self, stored: str | None, size: int) -> None:
        """Adds a record. ``stored``: the name in its header; None, unreadable: does not count."""
        if stored is None:
            return
        total = self._found.setdefault(stored or OTHER, {"bytes": 0, "records": 0})
        total["bytes"] += size
        total["records"] += 1

    def by_name(self) -> dict[str, dict[str, int]]:
        """Returns {bytes, records} of each tenant, sorted by name."""
        return dict(sorted(self._found.items()))


def client_of(params: Any, document: Any = None) -> str | None:
    """Returns the client that a request names in its hints, even if these are otherwise invalid.

    ``params``: its kv_transfer_params. ``document``: the hints of its envelope.
    """
    hints = params.get(HINTS_KEY) if isinstance(params, dict) else None
    for each in (hints, document):
        client = each.get("client") if isinstance(each, dict) else None
        if isinstance(client, str):
            return client
    return None
