# SPDX-License-Identifier: Apache-2.0
"""The spec. vLLM creates it in every process and gets from it a manager (scheduler) or a worker (each rank).

Importing this module starts nothing and loads no extension, because the API server needs only metric names.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kv_offload import __version__
from kv_offload.calibration import Calibration, CalibrationError
from kv_offload.config import OffloadConfig
from kv_offload.log import get_logger
from kv_offload.machine import KEPT_REGIONS, cautions, tier_bounds
from kv_offload.metrics import metric_definitions
from kv_offload.model_identity import weights_problem
from kv_offload.namespace import NamespaceIdentity, random_seed_warning
from kv_offload.sizes import format_bytes
from kv_offload.sizing import Geometry, startup_summary

from .bound_factors import HostFactors, calibration_for, factors_by_group
from .compat import OffloadingSpec, base, current_vllm_config, pass_cache_salts
from .hosts import HOSTS_DEADLINE_SECONDS, Hosts, connect_scheduler, keep_on_all_hosts, scheduler_hosts
from .identity import keep_for, merge_fingerprints, namespace_identity, share_for
from .kv_runs import share_of_values
from .tier_specs import TierPlan, common_settings

if TYPE_CHECKING:
    from kv_offload._core import HostLinks, HostRegion, TieredCache, TierSpec

    from .manager import KVOffloadManager, ManagerOptions
    from .worker import KVOffloadWorker

logger = get_logger(__name__)

RANKS_DEADLINE_SECONDS = 120.0
INFO_LABELS = ("version", "namespace", "layout", "copier", "cpu_bytes_to_use", "tiers", "eviction_policy")


class KVOffloadSpec(OffloadingSpec):
    """KV cache in host memory and on storage; see ``kv_offload.config.OffloadConfig`` for its settings."""

    @classmethod
    def build_metric_definitions(cls, extra_config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the metadata of every metric that ``get_stats`` may report, for vLLM's /metrics."""
        return {
            definition.name: _metric_metadata(definition.type, definition)
            for definition in metric_definitions()
        }

    @classmethod
    def config_info_keys(cls, extra_config: Mapping[str, Any]) -> tuple[str, ...]:
        """Returns the labels of ``vllm:kv_offload_config_info`` that the manager sets (0.33)."""
        return INFO_LABELS

    def __init__(self, config: Any) -> None:
        """Raises ValueError with one text that lists all errors in the configuration."""
        super().__init__(config)
        self._options = OffloadConfig.from_extra_config(config.extra_config)
        # With a replicated cache (pure MLA under TP) only rank 0 stores, and all ranks load from one area.
        # vLLM never sets it if the ranks are on several hosts: see ranks_per_area.
        self.replicated_layout = bool(getattr(config, "replicated_layout", False))
        self._manager: KVOffloadManager | None = None
        self._worker: KVOffloadWorker | None = None

    def get_worker(self, kv_caches: Any) -> "KVOffloadWorker":
        """Returns this rank's worker. Raises ValueError or ResourceError; the text says what to change."""
        if self._worker is None:
            from .life_cycle import finish_copies_before_sleep, refuse_weight_updates
            from .worker import make_worker

            if self._options.fixed_weights:
                refuse_weight_updates(current_vllm_config())
            self._worker = make_worker(self.config, self._options, self.replicated_layout, kv_caches)
            finish_copies_before_sleep()
        return self._worker

    def get_manager(self) -> "KVOffloadManager":
        """Returns the scheduler's manager. Waits for the ranks. Raises ValueError or ResourceError."""
        if self._manager is None:
            self._manager = self._make_manager()
        return self._manager

    @property
    def num_areas(self) -> int:
        return 1 if self.replicated_layout else int(self.config.parallel.world_size)

    def _make_manager(self) -> "KVOffloadManager":
        from kv_offload import _core

        from .events import describe_chunks
        from .manager import KVOffloadManager
        from .message_wait import wait_for_messages
        from .tracing import make_tracer
        from .watch import HostWatch

        options = self._options
        if self._describes_events():
            describe_chunks(whole=options.kv_events_unit == "chunk")
        region, links, hosts = self._attach()
        shard_bytes, merged = self._geometry(region)
        _log_layout(merged)
        identity, seed_is_random = namespace_identity(
            self.config, shard_bytes, merged, region.ranks_per_area > 1, options.model_id
        )
        calibration = calibration_for(options, identity)
        identity = identity.with_error_bounds(
            options.error_bounds(),
            merged["kv_runs"],
            _fp8_elements(merged),
            "" if calibration is None else calibration.digest,
        )
        # Check before any tier is opened: records without a complete identity must never be written.
        refuse_unknown_identity(options, merged)
        refuse_unknown_weights(options, identity)
        if seed_is_random and _exposed_by(options):
            logger.warning(random_seed_warning(identity.hash_algorithm))
        tenants = options.tenant_table()
        if tenants is not None and tenants.uses_salts:
            pass_cache_salts()
        bounds = tier_bounds(options)
        for caution in cautions(options):
            logger.warning(caution)
        metrics = _core.Metrics()
        plan = self._tier_plan(identity, merged)
        part = "" if hosts is None else hosts.part
        sharing = region.ranks_per_area
        factors = None if calibration is None else self._factors(calibration, plan, merged, hosts, sharing)
        tiers = plan.specs(options, bounds, part, factors)
        watches = self._watch_removals(tiers, hosts)
        identity = identity.with_part(part)
        over_hosts = {} if links is None else _tiers_over_hosts(links, plan)
        cache = self._make_cache(region, metrics, shard_bytes, merged, identity, tiers, over_hosts)
        if options.keep_host_memory:
            _log_kept(cache.stats())
        geometry = Geometry.of(self._tokens_per_chunk(), shard_bytes, _shards_per_area(merged))
        # max_bytes is that of each host; cpu_bytes_to_use and the chunks are those of the whole engine.
        count = 1 if hosts is None else hosts.count
        all_bounds = [None if bound is None else bound * count for bound in bounds]
        capacity = self._publish(metrics, geometry, all_bounds, merged, identity)
        manager = KVOffloadManager(
            cache,
            metrics,
            replace(
                self._manager_options(merged, identity, seed_is_random, capacity, watches),
                shared_number=region.shared_number,
            ),
            tracer=make_tracer(metrics, options.tier_names(), self.config.model.name),
            hosts=None if links is None else HostWatch(links, metrics),
        )
        manager.at_shutdown = wait_for_messages(options.wait_while_loading, merged["copier"], region, manager)
        return manager

    def _watch_removals(self, tiers: "Sequence[TierSpec]", hosts: Hosts | None) -> bool:
        """Makes tiers that publish KV events look for removals by other servers. Returns whether any does.

        None on several hosts: their tiers would report the removals to an idle scheduler, which takes none.
        """
        if hosts is not None or not self.kv_events_config.enable_kv_cache_events:
            return False
        for tier, setting in zip(tiers, self._options.secondary_tiers, strict=True):
            tier.watch_removals = setting.finds_removals and setting.enable_kv_events
        return any(tier.watch_removals for tier in tiers)

    def _publish(
        self,
        metrics: Any,
        geometry: Geometry,
        bounds: Sequence[int | None],
        merged: Mapping[str, Any],
        identity: NamespaceIdentity,
    ) -> int:
        """Serves the metrics and logs the startup summary.

        Returns the capacity of host memory and all tiers in tokens; 0: unknown.
        """
        options = self._options
        parallel = self.config.parallel
        address = options.metrics_address(None, parallel.world_size, parallel.data_parallel_index)
        if address is not None:
            metrics.expose(address)
        info = self._info(merged, identity)
        metrics.set("kv_offload_info", [info[label] for label in _labels_of("kv_offload_info")], 1)
        tokens = geometry.tokens_by_tier(options, bounds)
        for name, held in tokens.items():
            metrics.set("kv_offload_tier_capacity_tokens", [name], held)
        # The capacity of a tier without its own bound, such as a bucket, is unknown.
        capacity = 0 if None in bounds else sum(tokens.values())
        warning = small_capacity_warning(capacity, merged.get("max_model_len") or 0)
        if warning is not None:
            logger.warning(warning)
        logger.info(
            startup_summary(
                options,
                bounds,
                geometry,
                copier=merged["copier"],
                namespace=identity.short_id(),
                version=__version__,
                replica=parallel.data_parallel_index,
                replicas=parallel.data_parallel_size,
            )
        )
        return capacity

    def _manager_options(
        self,
        merged: Mapping[str, Any],
        identity: NamespaceIdentity,
        seed_is_random: bool,
        capacity: int,
        publishes_while_idle: bool,
    ) -> "ManagerOptions":
        from .events import TierEvents
        from .manager import ManagerOptions
        from .watch import Surroundings

        options = self._options
        tiers = dict(zip(options.tier_names(), options.secondary_tiers, strict=True))
        events = self.kv_events_config
        return ManagerOptions(
            parts_of=self._parts_of(),
            resumed_is_new=bool(merged.get("resumed_is_new")),
            tiers={name: tier.load_locality for name, tier in tiers.items()},
            publishes_events=events.enable_kv_cache_events,
            publishes_while_idle=publishes_while_idle,
            event_tiers={
                # The servers of tiers without a bound evict records, so no removal is ever reported.
                name: TierEvents(tier.published_locality, evicts_silently=tier.bound_key is None)
                for name, tier in tiers.items()
                if tier.enable_kv_events
            },
            info=self._info(merged, identity),
            request_hints=options.allowed_hints,
            tenants=options.tenant_table(),
            remote_wait_seconds=options.remote_wait_seconds,
            fixed_weights=options.fixed_weights,
            shares_host_memory=options.share_host_memory,
            expects_neighbours=self.config.parallel.data_parallel_size > 1,
            describes_events=self._describes_events(),
            surroundings=Surroundings(
                random_seed=identity.hash_algorithm if seed_is_random else "",
                other_namespaces=tuple(
                    text for tier in options.secondary_tiers for text in tier.other_namespaces(identity)
                ),
                group_ids=tuple(group.group_id for group in self.config.groups),
                capacity_tokens=capacity,
                write_policies=tuple(tier.write_policy for tier in options.secondary_tiers),
            ),
        )

    def _describes_events(self) -> bool:
        events = self.kv_events_config
        return bool(events.enable_kv_cache_events and events.self_describing_kv_events)

    def _attach(self) -> "tuple[HostRegion, HostLinks | None, Hosts | None]":
        """Returns the region, and the connections and hosts of an engine on several hosts. Waits for all
        ranks."""
        from kv_offload import _core

        world_size = self.config.parallel.world_size
        region = _core.HostRegion.attach_scheduler(
            self.config.engine_id,
            self._options.cpu_bytes_to_use,
            self.num_areas,
            world_size,
            huge_pages=self._options.huge_pages,
            keep_for=keep_for(self.config, self._options),
            share_for=share_for(self.config, self._options),
        )
        hosts = scheduler_hosts(region, world_size)
        links = connect_scheduler(hosts, region)
        try:
            region.wait_for_ranks(RANKS_DEADLINE_SECONDS)
        except _core.ResourceError as error:
            raise _core.ResourceError(f"{error}: {_rank_remedy(region, world_size)}") from error
        return region, links, hosts

    def _geometry(self, region: "HostRegion") -> tuple[list[list[int]], dict[str, Any]]:
        """Returns ([group position][area] bytes of a shard, the merged fingerprints of the ranks)."""
        ranks = [region.geometry(rank) for rank in range(self.config.parallel.world_size)]
        sharing = region.ranks_per_area
        per_area = [shards for shards, _ in ranks[::sharing]]
        merged = merge_fingerprints([text for _, text in ranks], sharing)
        # In other layouts the ranks of pipeline stages may differ in size.
        alike = len(ranks) if merged.get("canonical") else sharing
        for rank, (shards, _) in enumerate(ranks):
            first = rank - rank % alike
            if len(shards) != len(self.config.groups) or shards != ranks[first][0]:
                raise ValueError(
                    f"rank {rank} has chunks of {shards} bytes for {len(self.config.groups)} cache groups, "
                    f"rank {first} of {ranks[first][0]}; the ranks of this engine do not run the same model"
                )
        by_group = [[shards[group] for shards in per_area] for group in range(len(self.config.groups))]
        return by_group, merged

    def _tokens_per_chunk(self) -> list[int]:
        return [group.tokens_per_block * self.config.cache.blocks_per_chunk for group in self.config.groups]

    def _tier_plan(self, identity: NamespaceIdentity, merged: Mapping[str, Any]) -> TierPlan:
        # Each warning is about groups for which a part of the setting has no effect.
        exact_groups = _exact_groups(merged)
        exact = [position for position, is_exact in enumerate(exact_groups) if is_exact]
        bounds = self._options.error_bounds()
        if bounds is not None and exact:
            logger.warning(
                "cache groups %s are stored without loss: the lossy codec does not support them", exact
            )
        kv_runs = tuple(merged["kv_runs"])
        unknown = [
            position
            for position, (runs, is_exact) in enumerate(zip(kv_runs, exact_groups, strict=True))
            if not is_exact and not all(runs)
        ]
        if bounds is not None and bounds.values != bounds.keys and unknown:
            logger.warning(
                "cache groups %s: layout of keys and values unknown (%s); the keys' bound, %g, applies to "
                "all elements",
                unknown,
                "; ".join(dict.fromkeys(merged["kv_runs_unknown"][position] for position in unknown)),
                bounds.keys,
            )
        mixed = [
            position
            for position, (runs, is_exact, element) in enumerate(
                zip(kv_runs, exact_groups, merged["elements"], strict=True)
            )
            if not is_exact and all(runs) and share_of_values(runs, element) == 0
        ]
        if bounds is not None and bounds.values != bounds.keys and mixed:
            logger.warning(
                "cache groups %s: every 64 neighbouring elements contain a key, because the head size is too "
                "small; the keys' bound, %g, applies to all elements",
                mixed,
                bounds.keys,
            )
        settings = common_settings(self._options)
        return TierPlan(identity, tuple(merged["elements"]), tuple(exact_groups), kv_runs, settings)

    def _factors(
        self,
        calibration: Calibration,
        plan: TierPlan,
        merged: Mapping[str, Any],
        hosts: Hosts | None,
        ranks_per_area: int,
    ) -> HostFactors:
        """Returns the factors for the shards of this host. Raises CalibrationError.

        A shard is the part of one rank. Ranks that share an area hold the same bytes, which is one shard.
        Their cache (MLA) has no keys and values per head, so no lossy group is expected there.
        """
        if ranks_per_area > 1 and not all(plan.exact_groups):
            raise CalibrationError(
                f"a calibration needs ranks with different KV heads, and {ranks_per_area} ranks hold the "
                'same KV cache here: remove "calibration" on all hosts'
            )
        shard_bytes = [group.shard_bytes for group in plan.identity.groups]
        parallel = self.config.parallel
        ranks = range(parallel.world_size)
        if hosts is not None:
            ranks = hosts.ranks
            shard_bytes = [shards[ranks.start : ranks.stop] for shards in shard_bytes]
        return factors_by_group(calibration, shard_bytes, merged, plan.exact_groups, parallel, ranks)

    def _make_cache(
        self,
        region: "HostRegion",
        metrics: Any,
        shard_bytes: Sequence[Sequence[int]],
        merged: Mapping[str, Any],
        identity: NamespaceIdentity,
        tiers: "Sequence[TierSpec]",
        over_hosts: Mapping[str, Any],
    ) -> "TieredCache":
        from kv_offload import _core

        windowed = merged["windowed"]
        tenants = self._options.tenant_table()
        keep_identity = ""
        if self._options.keep_host_memory:
            keep_identity = identity.namespace_id().hex() + keep_on_all_hosts(over_hosts.get("hosts"))
        return _core.TieredCache(
            region,
            metrics,
            group_ids=[group.group_id for group in self.config.groups],
            tokens_per_chunk=self._tokens_per_chunk(),
            shard_bytes=shard_bytes,
            full_attention=() if windowed is None else [not flag for flag in windowed],
            tiers=tiers,
            eviction_policy=self._options.eviction_policy,
            load_policy=self._options.load_policy,
            lookup_timeout_seconds=self._options.lookup_timeout_seconds,
            keep_events=self.kv_events_config.enable_kv_cache_events,
            cache_blocks=merged["cache_blocks"],
            blocks_per_chunk=self.config.cache.blocks_per_chunk,
            shards_per_area=_shards_per_area(merged),
            keep_identity=keep_identity,
            max_pinned_bytes=self._options.pinned_bytes,
            tenants=() if tenants is None else tenants.shares,
            share_identity=identity.namespace_id().hex() if self._options.share_host_memory else "",
            **over_hosts,
        )

    def _parts_of(self) -> int | None:
        """Returns the tokens per chunk if vLLM looks up partial chunks; otherwise None.

        vLLM does that if chunks have one block, all chunks have the same size, and tokens are hashed in
        smaller units.
        """
        tokens = set(self._tokens_per_chunk())
        cache = self.config.cache
        if cache.blocks_per_chunk != 1 or len(tokens) != 1 or cache.tokens_per_hash in tokens:
            return None
        return tokens.pop()

    def _info(self, merged: Mapping[str, Any], identity: NamespaceIdentity) -> dict[str, str]:
        return {
            "version": __version__,
            "namespace": identity.short_id(),
            "layout": ", ".join((identity.kv_cache_layout, *_layout_words(merged))),
            "copier": merged["copier"],
            "cpu_bytes_to_use": str(self._options.cpu_bytes_to_use),
            "tiers": ",".join(self._options.tier_names()),
            "eviction_policy": self._options.eviction_policy,
        }


def _tiers_over_hosts(links: "HostLinks", plan: TierPlan) -> dict[str, Any]:
    """Returns the arguments of TieredCache for an engine on several hosts."""
    return {
        "hosts": links,
        "hosts_text": plan.to_text(),
        "hosts_timeout_seconds": HOSTS_DEADLINE_SECONDS,
    }


def _rank_remedy(region: "HostRegion", world_size: int) -> str:
    """Returns what to do about ranks that have not attached to the scheduler's region."""
    remedy = "check the logs of these ranks; the ranks must start before the scheduler, as in vLLM"
    if region.local_ranks < world_size:
        return remedy
    return f"{remedy}. If these ranks run on other hosts, use --nnodes and the mp executor (not Ray)"


def _shards_per_area(merged: Mapping[str, Any]) -> int:
    canonical = merged.get("canonical")
    return int(canonical["shards_per_area"]) if canonical else 1


def _layout_words(merged: Mapping[str, Any]) -> list[str]:
    """Returns the words about the layout in kv_offload_info, which doctor reads."""
    if merged.get("canonical"):
        return ["canonical"]
    return [f"kept apart: {merged['kept_apart']}"] if "kept_apart" in merged else []


def _exact_groups(merged: Mapping[str, Any]) -> list[bool]:
    """Returns for each group whether a lossy tier stores it without loss."""
    pairs = zip(merged["elements"], merged["may_lose"], strict=True)
    return [name == "bytes" or not may_lose for name, may_lose in pairs]


def _fp8_elements(merged: Mapping[str, Any]) -> dict[int, str]:
    """Returns the element types of the fp8 cache groups that a lossy tier stores with loss, by position."""
    pairs = enumerate(zip(merged["elements"], _exact_groups(merged), strict=True))
    return {at: name for at, (name, is_exact) in pairs if name.startswith("float8") and not is_exact}


def _log_layout(merged: Mapping[str, Any]) -> None:
    """Logs whether servers of other tensor-parallel sizes share the records, if canonical_layout is set."""
    if merged.get("canonical"):
        shards = merged["canonical"]["shards"]
        sizes = "" if shards == 1 else f" that divides {shards}"
        logger.info("canonical_layout: records are shared by servers of any tensor-parallel size%s", sizes)
    elif "kept_apart" in merged:
        logger.warning(
            "canonical_layout is not possible here, so records are not shared with other "
            "tensor-parallel sizes: %s",
            merged["kept_apart"],
        )


def refuse_unknown_identity(options: OffloadConfig, merged: Mapping[str, Any]) -> None:
    """Raises ValueError if other servers use the cache and part of its identity is unknown."""
    what = _exposed_by(options)
    if not what:
        return
    if merged["unread"]:
        raise ValueError(
            f"{what}: cannot distinguish this server's KV cache from that of other servers: failed to read "
            f"{', '.join(merged['unread'])}; report this, or serve without {what}"
        )
    if merged["numbered_images"]:
        raise ValueError(
            f"{what}: with --no-enable-prefix-caching and --mm-processor-cache-gb 0 vLLM numbers images "
            "instead of hashing them, so other images would be found by other servers; leave out one of them"
        )


def refuse_unknown_weights(options: OffloadConfig, identity: NamespaceIdentity) -> None:
    """Raises ValueError if other servers use the cache and the weights cannot be identified."""
    problem = weights_problem(identity.model)
    what = _exposed_by(options)
    if problem is None or not what:
        return
    exposes = {
        "secondary_tiers": "secondary_tiers outlive",
        "keep_host_memory": "keep_host_memory lets the cache outlive",
        "share_host_memory": "share_host_memory lets other servers load from",
    }
    raise ValueError(
        f"{exposes[what]} this server, but its weights cannot be identified: {problem}. "
        'Name them in kv_connector_extra_config, such as "model_id": "llama-3-8b 2026-01-31": the same name '
        "for all servers of the same weights, another one whenever the weights change"
    )


def _exposed_by(options: OffloadConfig) -> str:
    """Returns the setting by which later or other servers use this server's cache; "" if none does."""
    if options.secondary_tiers:
        return "secondary_tiers"
    settings = ("keep_host_memory", "share_host_memory")
    return next((name for name in settings if getattr(options, name)), "")


def _log_kept(stats: Mapping[str, int]) -> None:
    if not stats["is_kept"]:
        logger.warning(
            "keep_host_memory: all 64 names for regions of this model (%s) are taken, by running servers or "
            "by other users, so the memory is freed when this server ends; stop servers that you do not need",
            KEPT_REGIONS,
        )
        return
    logger.info(
        "host memory is kept when this server ends; found %d chunks of the previous server (%s)",
        stats["taken_over_chunks"],
        format_bytes(stats["resident_bytes"]),
    )


def small_capacity_warning(capacity_tokens: int, max_model_len: int) -> str | None:
    """Returns a warning if the longest prompt does not fit; None if it fits or the sizes are unknown."""
    if not 0 < capacity_tokens < max_model_len:
        return None
    return (
        f"host memory and tiers together hold {capacity_tokens:,} tokens, and a prompt may have "
        f"{max_model_len:,} (max_model_len): the longest prompts never hit completely; raise "
        "cpu_bytes_to_use or max_bytes"
    )


def _labels_of(name: str) -> Sequence[str]:
    return next(tuple(definition.labels) for definition in metric_definitions() if definition.name == name)


def _metric_metadata(kind: str, definition: Any) -> Any:
    if kind == "counter":
        return base.OffloadingCounterMetadata(definition.documentation, tuple(definition.labels))
    if kind == "gauge":
        return base.OffloadingGaugeMetadata(definition.documentation, tuple(definition.labels))
    return base.OffloadingHistogramMetadata(
        definition.documentation, tuple(definition.labels), buckets=tuple(definition.buckets)
    )
