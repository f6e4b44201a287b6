# SPDX-License-Identifier: Apache-2.0
"""Engines whose ranks span several hosts: which ranks run where, and how the scheduler finds the hosts.

The first rank of each other host listens on a free port, and puts its address and a fresh secret into the
store of torch.distributed, which vLLM has set up between all ranks. Rank 0 reads them there and passes them
to the scheduler in shared memory. vLLM's own connector handshake (``get_handshake_metadata``) comes too late:
the scheduler builds its manager before that, and the manager needs the layouts of all ranks.
"""

import atexit
import math
import socket
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from kv_offload import __version__
from kv_offload.config import OffloadConfig, several_hosts_problem
from kv_offload.log import get_logger
from kv_offload.machine import KEPT_REGIONS, cautions, tier_bounds

from . import compat
from .tier_specs import TierPlan

if TYPE_CHECKING:
    from kv_offload._core import HostAgent, HostLinks, HostRegion

    from .bound_factors import HostCalibration

logger = get_logger(__name__)

HOSTS_DEADLINE_SECONDS = 120.0  # at start, for all hosts in total: addresses, then connections
_REQUEST_WAIT_SECONDS = 60.0  # then the thread looks whether the agent was closed
_EXIT_SECONDS = 10.0  # for the thread; opening a directory on a hung mount takes longer
_PROBLEM_CHARACTERS = 1000  # of a refusal; the core sends 4096 bytes
MIN_WAIT_SECONDS = 0.1  # per host after the deadline: the store treats a timeout of 0 as no limit


@dataclass(frozen=True)
class Hosts:
    """The hosts of one engine, each with as many ranks as the others, in the order of the ranks."""

    count: int
    own: int  # the number of this one; 0: the host of the scheduler
    ranks_each: int

    @property
    def first_rank(self) -> int:
        """The first rank of this host."""
        return self.own * self.ranks_each

    @property
    def ranks(self) -> range:
        """The ranks of this host."""
        return range(self.first_rank, self.first_rank + self.ranks_each)

    @property
    def others(self) -> list[tuple[int, int]]:
        """Returns (first rank, number of ranks) of each host but the scheduler's."""
        return [(host * self.ranks_each, self.ranks_each) for host in range(1, self.count)]

    @property
    def part(self) -> str:
        """Returns the part of each chunk that this host has, for the namespace of its records."""
        return f"{_ranks_text(self.first_rank, self.ranks_each)} of {self.count * self.ranks_each}"

    def region_id(self, engine_id: str) -> str:
        """Returns the engine ID of this host's memory region: hosts may be containers with one /dev/shm."""
        return engine_id if self.own == 0 else f"{engine_id} host {self.own}"


def hosts_of(config: Any) -> Hosts | None:
    """Returns the hosts of this engine; None: all its ranks are on this one."""
    parallel = getattr(compat.current_vllm_config(), "parallel_config", None)
    count = getattr(parallel, "nnodes_within_dp", 1)
    if not isinstance(count, int) or count <= 1:
        return None
    own = int(getattr(parallel, "node_rank_within_dp", 0))
    return Hosts(count, own, config.parallel.world_size // count)


def scheduler_hosts(region: "HostRegion", world_size: int) -> Hosts | None:
    """Returns the hosts of the scheduler's engine; None: all its ranks are on this one.

    The scheduler has no configuration of vLLM, so it learns this from the region of its host's ranks.
    """
    ranks_each = region.local_ranks
    return None if ranks_each == world_size else Hosts(world_size // ranks_each, 0, ranks_each)


def refuse_on_several_hosts(hosts: Hosts | None, options: OffloadConfig, config: Any) -> None:
    """Raises ValueError if the settings need all ranks on one host and these are not."""
    if hosts is None:
        return
    more = []
    if getattr(config, "canonical_layout", False):
        more.append("canonical_layout")
    # vLLM does not set it for ranks on several hosts: only rank 0 would store then.
    if getattr(config, "replicated_layout", False):
        more.append("replicated_layout")
    if problem := several_hosts_problem(options, hosts.count, more):
        raise ValueError(problem)


def ranks_per_area(hosts: Hosts | None, config: Any, replicated: bool) -> int:
    """Returns how many consecutive ranks share an area of host memory, because they hold the same bytes.

    Called by every rank; all ranks of an engine get the same number. The first rank of each area stores.
    ``replicated``: vLLM's replicated_layout, which it sets only if all ranks are on one host. With ranks on
    several hosts, the tensor-parallel ranks of a host share an area if their layers are replicated.
    """
    if replicated:
        return int(config.parallel.world_size)
    if hosts is None or not _is_replicated(config):
        return 1
    # vLLM numbers the tensor-parallel ranks of a pipeline stage consecutively.
    return math.gcd(config.parallel.tp_size, hosts.ranks_each)


def _is_replicated(config: Any) -> bool:
    """True if all tensor-parallel ranks of a pipeline stage hold the same KV cache (MLA).

    The conditions are those of vLLM's replicated_layout, except that pipelines and several hosts are allowed.
    """
    parallel = config.parallel
    vllm_config = compat.current_vllm_config()
    if vllm_config is None or parallel.world_size != parallel.tp_size * parallel.pp_size:
        return False
    known = vllm_config.compilation_config.static_forward_context
    try:
        # Only some stages may have the layers of a drafter or of Mamba, so the stages could differ.
        if parallel.pp_size > 1 and (
            getattr(vllm_config, "speculative_config", None) is not None or vllm_config.model_config.is_hybrid
        ):
            return False
        return (
            getattr(parallel, "dcp_size", 1) == 1
            and bool(vllm_config.model_config.use_mla)
            and all(
                compat.layer_is_replicated(known[name], vllm_config)
                for group in config.groups
                for name in group.layer_names  # a stage may have none of a group
            )
        )
    except Exception as error:  # an unusual layer: each rank stores its own bytes
        logger.debug("whether the KV cache is replicated is not known: %s", error)
        return False


def connect_rank(
    hosts: Hosts | None, region: "HostRegion", config: Any, store: Any | None = None
) -> "HostAgent | None":
    """Makes this host known to the scheduler, if this rank is one that does it. Called by every rank.

    Returns the agent of the first rank of a host without the scheduler. Raises ResourceError if another host
    does not announce itself in time (rank 0), or if this one has no usable address. ``store`` replaces that
    of torch.distributed.
    """
    from kv_offload import _core

    rank = config.parallel.rank
    if hosts is None or rank != hosts.first_rank:
        return None
    if store is None:
        store = _rendezvous_store()
    name = f"kv_offload/{config.parallel.data_parallel_index}/"  # replicas may share the store
    if rank == 0:
        for first, endpoint in _await_endpoints(store, name, hosts).items():
            region.set_endpoint(first, endpoint)
        return None
    agent = _core.HostAgent(region, address=numeric_address(), version=__version__)
    store.set(name + str(hosts.own), agent.endpoint)
    return agent


def serve_tiers(
    agent: "HostAgent", hosts: Hosts, options: OffloadConfig, calibration: "HostCalibration"
) -> threading.Thread:
    """Starts a thread that opens the tiers of this host when the scheduler orders it. Ends with the agent."""
    thread = threading.Thread(
        target=_serve_tiers, args=(agent, hosts, options, calibration), name="kv-offload-tiers", daemon=True
    )
    thread.start()
    # A thread that is still in the core when the interpreter ends would abort the process.
    atexit.register(_end_serving, weakref.ref(agent), thread)
    return thread


def _end_serving(agent: "weakref.ref[HostAgent]", thread: threading.Thread) -> None:
    if (served := agent()) is not None:
        served.close()
    thread.join(_EXIT_SECONDS)


def _serve_tiers(
    agent: "HostAgent", hosts: Hosts, options: OffloadConfig, calibration: "HostCalibration"
) -> None:
    bounds: list[int | None] | None = None
    while not agent.is_closed:
        request = agent.wait_for_tiers(_REQUEST_WAIT_SECONDS)
        if request is None:
            continue
        round, epochs, text = request
        try:
            plan = TierPlan.of_text(text)
            plan.refuse_other_settings(options)
            if bounds is None:
                for caution in cautions(options):
                    logger.warning(caution)
                bounds = list(tier_bounds(options))
            tenants = options.tenant_table()
            shares = () if tenants is None else tenants.shares
            factors = calibration.factors(plan.identity, plan.exact_groups)
            specs = plan.specs(options, bounds, hosts.part, factors)
            agent.open_tiers(round, epochs, specs, tenants=shares)
        except Exception as error:  # the scheduler raises it
            agent.refuse_tiers(round, (str(error) or type(error).__name__)[:_PROBLEM_CHARACTERS])


def _await_endpoints(store: Any, name: str, hosts: Hosts) -> dict[int, str]:
    """Returns first rank -> endpoint of each other host. Raises ResourceError naming all that are missing."""
    from kv_offload import _core

    deadline = time.monotonic() + HOSTS_DEADLINE_SECONDS
    endpoints: dict[int, str] = {}
    missing: list[str] = []
    cause: RuntimeError | None = None
    for host, (first, ranks) in enumerate(hosts.others, 1):
        try:
            endpoints[first] = _await_endpoint(store, name + str(host), deadline - time.monotonic())
        except RuntimeError as error:  # torch's error for a timeout and for a lost store
            missing.append(f"host {host} of this engine ({_ranks_text(first, ranks)})")
            cause = error
    if missing:
        address, log = ("its address", "its log") if len(missing) == 1 else ("their addresses", "their logs")
        raise _core.ResourceError(
            f"{', '.join(missing)} did not announce {address} within {HOSTS_DEADLINE_SECONDS:g} s: check "
            f"{log}; all hosts need this plugin and the same --kv-transfer-config ({cause})"
        ) from cause
    return endpoints


def _await_endpoint(store: Any, key: str, seconds: float) -> str:
    store.wait([key], timedelta(seconds=max(seconds, MIN_WAIT_SECONDS)))
    return bytes(store.get(key)).decode()


def _ranks_text(first: int, ranks: int) -> str:
    return f"rank {first}" if ranks == 1 else f"ranks {first} to {first + ranks - 1}"


def connect_scheduler(hosts: Hosts | None, region: "HostRegion") -> "HostLinks | None":
    """Connects the scheduler to the other hosts. Raises ResourceError naming each host that is missing."""
    from kv_offload import _core

    if hosts is None:
        return None
    links = _core.HostLinks(region, hosts.others, version=__version__)
    try:
        links.wait_until_connected(HOSTS_DEADLINE_SECONDS)
    except _core.ResourceError as error:
        links.close()
        raise _core.ResourceError(f"not all hosts of this engine joined: {error}") from error
    return links


def keep_on_all_hosts(links: "HostLinks | None") -> str:
    """Lets the memory of the other hosts outlive this engine. Returns text that identifies the memory of all.

    The text is the same as that of an earlier engine only if every host still has its part of that engine's
    memory; "" on one host. Logs which hosts do not. Raises ResourceError naming hosts that do not confirm.
    """
    if links is None:
        return ""
    identity, missing, ending = links.keep_memory(HOSTS_DEADLINE_SECONDS)
    if missing:
        logger.warning(
            "keep_host_memory: all chunks of the previous server (0 kept) are dropped on all hosts, because "
            "not every host has its part of them: %s",
            "; ".join(missing),
        )
    if ending:
        logger.warning(
            "keep_host_memory: all 64 names for regions of this model (%s) are taken on %s, so its memory is "
            "freed when this server ends, and the next server finds no chunks; stop servers that you do not "
            "need",
            KEPT_REGIONS,
            "; ".join(ending),
        )
    return f" {identity}"


def _rendezvous_store() -> Any:
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def numeric_address(address_of_host: Callable[[], str] | None = None) -> str:
    """Returns the IP address that vLLM uses for this host. Raises ValueError if it is not known.

    ``address_of_host`` replaces vLLM's function, which VLLM_HOST_IP overrides.
    """
    given = (address_of_host or compat.host_address)()
    try:
        found = str(socket.getaddrinfo(given, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ValueError(
            f"the address of this host, {given}, cannot be resolved ({error}): {_REMEDY}"
        ) from error
    if found in ("0.0.0.0", "::"):
        raise ValueError(f"the address of this host is not known ({given}): {_REMEDY}")
    return found.partition("%")[0]


_REMEDY = "set VLLM_HOST_IP on each host to an address that the other hosts reach"
