# SPDX-License-Identifier: Apache-2.0
"""The settings: ``kv_connector_extra_config`` in ``--kv-transfer-config``.

One error reports all problems of a configuration, each with its key, the given value and the possible values.
Importing this module loads neither the C++ core nor vLLM.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializeAsAny,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from kv_offload import config_compat
from kv_offload.hints import ACTION_TYPES
from kv_offload.log import get_logger
from kv_offload.losses import ErrorBounds
from kv_offload.tenants import (
    MAX_TENANTS,
    NAME_PATTERN,
    TenantConfig,
    TenantTable,
    key_problems,
    tenant_problems,
)
from kv_offload.tiers.base import EVICTION_POLICIES, ByteSize, Threads, TierConfig, known_eviction_policy
from kv_offload.tiers.compression import CompressedTierConfig
from kv_offload.tiers.registry import entry_at, kinds, labels_of, parse_tier

logger = get_logger(__name__)

MAX_TIERS = 8
MAX_REMOTE_WAIT_MS = 3_600_000  # lookup_timeout_ms ends a wait sooner
# Request settings: each is the key kv_offload_* of kv_transfer_params.
REQUEST_SETTINGS = ("load_policy", "priority", "skip_load", "skip_store", "remote_wait_ms")

# Settings that need all ranks of an engine on one host.
ONE_HOST_SETTINGS = ("share_host_memory",)

AnyTier = Annotated[SerializeAsAny[TierConfig], BeforeValidator(parse_tier)]


class ConfigError(ValueError):
    """An invalid configuration. ``problems`` has one sentence for each problem."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        count = "a problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__(
            f"kv_connector_extra_config has {count}:" + "".join(f"\n  - {text}" for text in problems)
        )


class OffloadConfig(BaseModel):
    """Our keys in ``kv_connector_extra_config``. Create it with ``from_extra_config``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cpu_bytes_to_use: ByteSize = Field(
        gt=0, description="host memory for the whole engine, all ranks together"
    )
    secondary_tiers: tuple[AnyTier, ...] = Field(
        default=(),
        max_length=MAX_TIERS,
        description=f"tiers below host memory, fastest first, at most {MAX_TIERS}",
    )
    eviction_policy: str = Field(
        default="prefix",
        description='eviction order of host memory: "prefix" (ends of prompts first, by predicted reuse) '
        'or "lru"',
    )
    model_id: str | None = Field(
        default=None,
        min_length=1,
        max_length=256,
        description="name of the weights. Required where neither local files nor a commit identify them "
        "(object stores, models outside the hub's cache). Servers share records only under the same name",
    )
    request_hints: Literal["allow", "ignore"] | tuple[str, ...] = Field(
        default="allow",
        description="hints that requests may send in their kv_transfer_params: all, none, or a list of "
        'request settings and hint types, such as ["priority", "resume_in", "release"]. Use ignore if '
        "clients are not trusted",
    )
    max_pinned_bytes: ByteSize | None = Field(
        default=None,
        ge=0,
        description="host memory that pin hints of all requests may hold, at most half of cpu_bytes_to_use; "
        "one client may hold half of this. Default: an eighth of cpu_bytes_to_use",
    )
    tenants: dict[Annotated[str, Field(pattern=NAME_PATTERN)], TenantConfig] = Field(
        default={},
        max_length=MAX_TENANTS,
        description=f"names of tenants and their shares, at most {MAX_TENANTS}: see Tenants. Default: all "
        "requests share host memory, directories and bandwidth",
    )
    load_policy: Literal["auto", "always", "never"] = Field(
        default="auto",
        description="auto: load where loading is faster than computing; always: load every hit; never: "
        "load nothing",
    )
    lookup_timeout_ms: int = Field(
        default=5_000, ge=1, description="longest wait of a request for a tier, in ms"
    )
    remote_wait_ms: int = Field(
        default=0,
        ge=0,
        le=MAX_REMOTE_WAIT_MS,
        description="how long a request waits for chunks that another server is still writing, in ms. For "
        "servers that decode what other servers prefill",
    )
    wait_while_loading: Literal["auto", "sleep", "spin"] = Field(
        default="auto",
        description="how vLLM's processes wait for each other while a request waits for a tier: spin (vLLM's "
        "default), or sleep 0.2 ms between checks, which frees cores for the reader threads. auto: sleep "
        "where vLLM computes on the CPU",
    )
    openmp_wait: Literal["auto", "sleep", "spin"] = Field(
        default="auto",
        description="how idle OpenMP threads of ranks on the CPU wait: spin for 3 ms (GNU's default), or "
        "sleep after 10 us. auto: sleep if this engine's ranks compute on all cores. GOMP_SPINCOUNT and "
        "OMP_WAIT_POLICY in vLLM's environment take precedence",
    )
    keep_host_memory: bool = Field(
        default=False,
        description="keep host memory after the server ends, even after a crash, for the next server of the "
        "same model. Until then the memory stays allocated, unless another start needs it",
    )
    share_host_memory: bool = Field(
        default=False,
        description="let servers of the same model, user and host load chunks from each other's host memory. "
        "All need the same cpu_bytes_to_use and the same /dev/shm",
    )
    kv_events_unit: Literal["chunk", "block"] = Field(
        default="chunk",
        description="what KV events name if a chunk has several blocks (blocks_per_chunk). chunk: the "
        "chunk, so that every advertised prefix can be loaded; block: all of its blocks, for routers that "
        "index vLLM's blocks, such as llm-d. See Routers",
    )
    fixed_weights: bool = Field(
        default=False,
        description="declares that the weights never change while the server runs. A cache reset, also one "
        "by sleep or pause, then keeps host memory and all tiers, and vLLM's weight updates are refused",
    )
    metrics_port: int | None = Field(
        default=None,
        ge=1,
        le=65_535,
        description="port of an additional /metrics page of each process: the scheduler uses this port, "
        "rank r this port + 1 + r",
    )
    metrics_host: str = Field(default="127.0.0.1", description="address that metrics_port listens on")
    copy_threads: Threads = Field(
        default=2, description="threads of the copier on the CPU platform, per rank"
    )
    copy_kernel_blocks: int = Field(
        default=8,
        ge=1,
        le=1024,
        description="SMs that the kernel for small pages uses on a GPU, per rank",
    )
    prefault: bool = Field(
        default=True, description="allocate all host memory at start instead of at first use"
    )
    huge_pages: bool = Field(default=True, description="use huge pages if the system offers them")

    @field_validator("metrics_port", mode="before")
    @classmethod
    def _zero_is_off(cls, value: object) -> object:
        return None if value in (0, "0", "") else value

    @field_validator("request_hints", mode="before")
    @classmethod
    def _known_hints(cls, value: object) -> object:
        if value in ("allow", "ignore"):
            return value
        known = (*REQUEST_SETTINGS, *ACTION_TYPES)
        names = value if isinstance(value, (list, tuple)) else [value]
        wrong = [name for name in names if not isinstance(name, str) or name not in known]
        if isinstance(value, (list, tuple)) and not wrong:
            return tuple(value)
        given = repr(wrong[0]) if wrong else f"{value!r} without a list"
        raise ValueError(f"is {given}; possible: allow, ignore, or a list of {', '.join(known)}")

    @field_validator("eviction_policy")
    @classmethod
    def _known_eviction_policy(cls, value: str) -> str:
        return known_eviction_policy(value)

    @field_validator("tenants")
    @classmethod
    def _valid_tenants(cls, value: dict[str, TenantConfig], info: ValidationInfo) -> dict[str, TenantConfig]:
        tiers = info.data.get("secondary_tiers", ())
        encrypted = [bool(getattr(tier, "encryption_key_file", None)) for tier in tiers]
        if problems := tenant_problems(value) + key_problems(value, encrypted):
            raise ValueError("; ".join(problems))
        return value

    @field_validator("secondary_tiers")
    @classmethod
    def _places_apart(cls, value: tuple[TierConfig, ...]) -> tuple[TierConfig, ...]:
        places = [(tier.type, tier.place_key, tier.place) for tier in value]
        for kind, key, place in sorted(set(places)):
            if places.count((kind, key, place)) > 1:
                raise ValueError(f"name {place} more than once; each tier needs its own {key}")
        return value

    @field_validator("secondary_tiers")
    @classmethod
    def _one_lossy_tier(cls, value: tuple[TierConfig, ...]) -> tuple[TierConfig, ...]:
        lossy = [
            f"{tier.label()} ({tier.compress})"
            for tier in value
            if isinstance(tier, CompressedTierConfig) and tier.error_bounds()
        ]
        if len(lossy) > 1:
            raise ValueError(
                f"have {len(lossy)} lossy tiers, {' and '.join(lossy)}: a chunk that moves from one to the "
                "other would lose twice; set compress to lossy:E for one tier only"
            )
        return value

    @classmethod
    def from_extra_config(cls, extra: Mapping[str, Any]) -> "OffloadConfig":
        """Returns the configuration in vLLM's ``kv_connector_extra_config``.

        Skips vLLM's own keys. Ignores the keys of vLLM's specs that have no use here, with one warning.
        Raises ConfigError (a ValueError) with every problem in one text.
        """
        config, notes = cls.parse(extra)
        if notes:
            logger.warning("kv_connector_extra_config: %s", "; ".join(notes))
        return config

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> tuple["OffloadConfig", list[str]]:
        """Like ``from_extra_config``, but returns the sentences of the warning instead of logging them."""
        if not isinstance(extra, Mapping):
            raise ConfigError([f"it is {type(extra).__name__}, not a table of keys and values"])
        if config_compat.is_llmd_config(extra):
            raise ConfigError([config_compat.llmd_advice(extra)])
        notes: list[str] = []
        problems: list[str] = []
        ours = config_compat.own_keys(
            extra,
            tuple(cls.model_fields),
            tuple(key for kind in kinds().values() for key in kind.model_fields),
            EVICTION_POLICIES,
            notes,
            problems,
        )
        tiers = ours.get("secondary_tiers") or []
        if not isinstance(tiers, (list, tuple)):
            problems.append(
                f"secondary_tiers is {type(tiers).__name__}; it must be a list of tables such as "
                + json.dumps([config_compat.example_tier()])
            )
            tiers = []
        # Tiers are checked one by one, so that the problems of all of them are reported at once.
        ours["secondary_tiers"] = []
        for index, given in enumerate(tiers):
            tier = _tier(index, given, notes, problems)
            if tier is not None:
                ours["secondary_tiers"].append(tier)
        try:
            config = cls.model_validate(ours)
        except ValidationError as error:
            problems = [_sentence(detail) for detail in error.errors()] + problems
        if problems:
            raise ConfigError(problems)
        return config, notes

    @property
    def pinned_bytes(self) -> int:
        """The effective ``max_pinned_bytes``."""
        given = self.max_pinned_bytes
        return self.cpu_bytes_to_use // 8 if given is None else min(given, self.cpu_bytes_to_use // 2)

    @property
    def allowed_hints(self) -> frozenset[str]:
        """The request settings and types of hints that requests may send."""
        if isinstance(self.request_hints, tuple):
            return frozenset(self.request_hints)
        return frozenset((*REQUEST_SETTINGS, *ACTION_TYPES) if self.request_hints == "allow" else ())

    def tenant_table(self) -> TenantTable | None:
        """Returns how the tenant of a request is found; None without ``tenants``."""
        return TenantTable(self.tenants) if self.tenants else None

    @property
    def lookup_timeout_seconds(self) -> float:
        return self.lookup_timeout_ms / 1000

    @property
    def remote_wait_seconds(self) -> float:
        return self.remote_wait_ms / 1000

    def error_bounds(self) -> ErrorBounds | None:
        """Returns the largest relative errors that records of any tier may have; None: all are exact."""
        return next((bounds for tier in self.secondary_tiers if (bounds := tier.error_bounds())), None)

    def calibration_file(self) -> str | None:
        """Returns the calibration of the lossy tier; None: it has none."""
        return next(
            (
                tier.calibration
                for tier in self.secondary_tiers
                if isinstance(tier, CompressedTierConfig) and tier.calibration is not None
            ),
            None,
        )

    def lossy_tiers(self) -> list[str]:
        """Returns the labels of the tiers whose records may lose precision."""
        named = zip(self.tier_names(), self.secondary_tiers, strict=True)
        return [name for name, tier in named if tier.error_bounds() is not None]

    def tier_names(self) -> tuple[str, ...]:
        """Labels of the tiers in metrics and events: fs, fs-2, fs-3, ..."""
        return labels_of([tier.type for tier in self.secondary_tiers])

    def metrics_address(
        self, rank: int | None, world_size: int = 1, data_parallel_index: int = 0
    ) -> str | None:
        """Returns host:port of the /metrics page of one process, or None if it is off.

        ``rank`` None is the scheduler. Replicas on one host use consecutive ranges of ``1 + world_size``
        ports. Raises ConfigError if the port is above 65535.
        """
        if self.metrics_port is None:
            return None
        process = 0 if rank is None else 1 + rank
        port = self.metrics_port + data_parallel_index * (1 + world_size) + process
        if port > 65_535:
            raise ConfigError(
                [f"metrics_port {self.metrics_port} gives this process port {port}; choose a lower one"]
            )
        return f"{self.metrics_host}:{port}"


def types_on_several_hosts() -> list[str]:
    """Returns the types of tiers that engines whose ranks span several hosts can use."""
    return sorted(name for name, kind in kinds().items() if kind.works_on_several_hosts)


def several_hosts_problem(options: OffloadConfig, hosts: int, more: Iterable[str] = ()) -> str | None:
    """Returns why an engine whose ranks span ``hosts`` hosts cannot use ``options``; None if it can.

    ``more``: used settings that are not in ``options`` and need all ranks on one host.
    """
    used = [name for name in ONE_HOST_SETTINGS if getattr(options, name)] + list(more)
    unsupported = sorted({tier.type for tier in options.secondary_tiers if not tier.works_on_several_hosts})
    used += [f'a tier of type "{name}"' for name in unsupported]
    if hosts <= 1 or not used:
        return None
    return (
        f"this engine's ranks span {hosts} hosts, and it was given {', '.join(used)}: engines on "
        f"several hosts keep their cache in host memory and in tiers of these types only: "
        f"{', '.join(types_on_several_hosts())}; leave these settings out, or keep tensor and pipeline "
        "parallelism inside one host"
    )


def tier_at(place: str) -> TierConfig:
    """Returns the tier for a place on the command line (``tiers.entry_at``).

    Raises ValueError, which shows an address only if its kind does, because it may contain a password.
    """
    entry = entry_at(place)
    try:
        return kinds()[entry["type"]].model_validate(entry)
    except ValidationError as error:
        plain = not set("@?") & set(place)  # otherwise the input may be part of a password
        problems = (_sentence(detail, entry["type"], plain) for detail in error.errors())
        raise ValueError("; ".join(problems)) from None


def _tier(index: int, given: Any, notes: list[str], problems: list[str]) -> TierConfig | None:
    ours = config_compat.own_tier_keys(index, given, notes, problems)
    try:
        return None if ours is None else kinds()[ours["type"]].model_validate(ours)
    except ValidationError as error:
        problems.extend(_sentence(detail, f"secondary_tiers[{index}]") for detail in error.errors())
        return None


def _sentence(detail: Any, where: str = "", shown: bool = True) -> str:
    """Rewords a pydantic error: key, problem, and the given value if ``shown``."""
    for part in detail["loc"]:
        where += f"[{part}]" if isinstance(part, int) else f".{part}" if where else str(part)
    if detail["type"] == "missing":
        if where == "cpu_bytes_to_use":
            return 'cpu_bytes_to_use is required: host memory for the whole engine, such as "32GiB"'
        return f"{where} is required"
    if detail["type"] == "value_error":
        return f"{where}: {detail['ctx']['error']}"
    message = detail["msg"].replace("Input should", "it should")
    return f"{where} is {detail['input']!r}; {message}" if shown else f"{where}: {message}"
