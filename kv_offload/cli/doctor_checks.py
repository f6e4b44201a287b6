# SPDX-License-Identifier: Apache-2.0
"""The checks of ``kv-offload doctor`` on this machine. They return results and print nothing."""

import os
import platform
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

import kv_offload
from kv_offload import machine, vllm_versions
from kv_offload.cli.terminal import rate
from kv_offload.config import ConfigError, OffloadConfig, types_on_several_hosts
from kv_offload.machine import check_machine as machine_problems
from kv_offload.machine import gpus, host_memory, no_copier, tier_bounds
from kv_offload.sizes import format_bytes
from kv_offload.tiers.base import State, TierConfig
from kv_offload.tiers.encryption import key_findings

PLUGIN_GROUP = "vllm.general_plugins"


@dataclass(frozen=True)
class Check:
    """One result. ``figures`` are for --json: plain numbers in bytes and seconds."""

    name: str
    state: State
    text: str
    figures: dict[str, Any] | None = None


def software() -> Iterator[Check]:
    """Checks this package, its core, vLLM, and whether vLLM finds the plugin."""
    yield Check(
        "kv-offload",
        "ok",
        f"{kv_offload.__version__}, Python {platform.python_version()}, {platform.platform()}",
    )
    found = vllm_versions.installed_vllm()
    if found is None:
        yield Check("vllm", "refused", "not installed here; install vllm in the same environment")
        return
    name, version = found
    problem = vllm_versions.version_problem(version)
    if problem:
        supported = vllm_versions.SUPPORTED
        yield Check("vllm", "refused", f"{name} {version}: {problem}; supported are {supported}")
    else:
        yield Check("vllm", "ok", f"{name} {version}, supported")
    yield plugin()


def plugin() -> Check:
    """Checks that our entry point is installed and VLLM_PLUGINS allows it."""
    names = [point.name for point in entry_points(group=PLUGIN_GROUP) if "kv_offload" in point.value]
    allowed = os.environ.get("VLLM_PLUGINS")
    needs_path = 'set spec_module_path "kv_offload.specs" next to spec_name'
    if not names:
        return Check(
            "plugin", "note", f"no {PLUGIN_GROUP} entry point, not installed as a package; {needs_path}"
        )
    if allowed is not None and names[0] not in allowed.split(","):
        return Check("plugin", "note", f"VLLM_PLUGINS={allowed} excludes {names[0]}; {needs_path}")
    return Check("plugin", "ok", "spec_name alone is enough")


def device() -> Check:
    """Returns the copier that would be used."""
    from kv_offload import _core

    reason = _core.cuda_unavailable_reason()
    if not reason:
        return Check("device", "ok", f"CUDA copier: {_core.describe_cuda_copier()}")
    if gpus() and not vllm_versions.serves_on_cpu():
        return Check("device", "refused", no_copier("cuda", reason))
    return Check("device", "note", f"host copier: {reason}")


def connections() -> list[Check]:
    """Checks that this build can connect the hosts of an engine; no check if it can."""
    from kv_offload import _core

    problem = _core.hosts_problem()
    return [Check("hosts", "refused", problem)] if problem else []


def memory(config: OffloadConfig | None, hosts: int = 1) -> Check:
    """Compares requested with available host memory. ``hosts``: number of hosts of the engine."""
    available, limited_by = host_memory()
    figures = {"available_bytes": available, "limited_by": limited_by}
    text = f"{format_bytes(available)} available ({limited_by})"
    if config is None:
        return Check("memory", "ok", text, figures)
    alone = config.model_copy(update={"secondary_tiers": ()})
    problems = machine_problems(alone, hosts=hosts, headroom=lambda _: (available, limited_by))
    asked = f"{format_bytes(config.cpu_bytes_to_use // hosts)} of {text}"
    return Check("memory", "refused" if problems else "ok", problems[0] if problems else asked, figures)


def tenants(config: OffloadConfig) -> list[Check]:
    """Checks the keys of tenants; no check for a tenant without a key."""
    return [
        Check(f"tenant {name}", answer.state, answer.text)
        for name, tenant in config.tenants.items()
        for answer in key_findings(tenant.encryption_key_file)
    ]


def regions() -> list[Check]:
    """Reports the memory of servers that share it, kept memory, and leftovers. Omits memory that does not
    exist."""
    found = machine.regions()
    checks = []

    def add(name: str, state: State, these: list[machine.Region], text: str) -> None:
        if these:
            taken = sum(each.bytes for each in these)
            figures = {"regions": len(these), "bytes": taken}
            checks.append(Check(name, state, f"{format_bytes(taken)} {text}", figures))

    # A region that a process holds is in use. Without one it is kept on purpose, or left by a killed server.
    shared = [each for each in found if each.is_held and each.is_shared]
    add("shared memory", "ok", shared, f"in {_count(shared)} of running servers (share_host_memory)")
    kept = [each for each in found if each.is_kept and not each.is_held]
    names = [f"{machine.SHM_DIRECTORY}/{name}" for each in kept for name in machine.shared_names(each)]
    text = (
        "kept by stopped servers (keep_host_memory) for the next start; a start that needs the memory "
        f"frees it, or free it with rm {' '.join([machine.KEPT_REGIONS, *names])}"
    )
    add("kept memory", "ok", kept, text)
    left = [each for each in found if not each.is_kept and not each.is_held]
    paths = " ".join(f"{machine.SHM_DIRECTORY}/{each.name}" for each in left)
    text = (
        f"in {_count(left)} of servers that were killed; "
        f"the next start of any server frees it, or free it with rm {paths}"
    )
    add("leftover memory", "note", left, text)
    return checks


def _count(regions: list[machine.Region]) -> str:
    return f"{len(regions)} region{'s' if len(regions) > 1 else ''}"


def place(tier: TierConfig, hosts: int = 1) -> list[Check]:
    """Checks whether this host can use the tier. ``hosts``: number of hosts of the engine."""
    problems = tier.problems()
    if hosts > 1 and not tier.works_on_several_hosts:
        problems.append(
            f'an engine on {hosts} hosts cannot use a tier of type "{tier.type}"; '
            f"possible types: {', '.join(types_on_several_hosts())}"
        )
    if problems:
        return [Check(tier.label(), "refused", problem) for problem in problems]
    answer = tier.summary()
    more = (Check(tier.label(), each.state, each.text, each.figures) for each in tier.findings())
    return [Check(tier.label(), answer.state, answer.text, answer.figures), *more]


def speed(tier: TierConfig, total_bytes: int) -> list[Check]:
    """Measures its speed without vLLM; no check if that is not possible."""
    answer = tier.measure(total_bytes)
    if answer is None:
        return []
    answers = [answer, *tier.measured(answer.figures or {})]
    return [Check(tier.label(), each.state, each.text, each.figures) for each in answers]


def copy_speed(threads: int, total_bytes: int) -> Check:
    """Measures the host copier between two buffers."""
    from kv_offload import _core

    speed = _core.measure_copy(total_bytes, threads)
    text = f"{rate(speed)} with {threads} threads, host memory to host memory"
    return Check("copy", "ok", text, {"bytes_per_second": speed, "threads": threads})


def metrics_port(config: OffloadConfig, ranks: int) -> list[Check]:
    """Checks that the /metrics port of each process is free; no check if they are off."""
    found = []
    for rank in (None, *range(ranks)):
        try:
            address = config.metrics_address(rank, ranks)
        except ConfigError as error:
            return [Check("metrics port", "refused", error.problems[0])]
        if address is None:
            return []
        host, _, port = address.rpartition(":")
        process = "the scheduler" if rank is None else f"rank {rank}"
        try:
            with socket.socket() as probe:
                # Like a server: a closed earlier connection must not block the port.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, int(port)))
        except OSError as error:
            what = f"{address} for {process}: {error.strerror}; set another metrics_port or metrics_host"
            found.append(Check("metrics port", "refused", what))
    if not found:
        text = f"{config.metrics_host}:{config.metrics_port} to +{ranks} are free"
        found.append(Check("metrics port", "ok", text))
    return found


def plan(config: OffloadConfig) -> list[tuple[str, str, bool]]:
    """Returns the effective settings: (name, value, whether it was given)."""
    rows = []
    for name in type(config).model_fields:
        if name == "secondary_tiers":
            continue
        value = getattr(config, name)
        text = format_bytes(value) if name == "cpu_bytes_to_use" else _shown(value)
        rows.append((name, text, name in config.model_fields_set))
    for label, tier, bound in zip(
        config.tier_names(), config.secondary_tiers, tier_bounds(config), strict=True
    ):
        own_first = sorted(type(tier).model_fields, key=TierConfig.model_fields.__contains__)
        for name in own_first:
            if name == "type":
                continue
            value = getattr(tier, name)
            text = format_bytes(bound) if name == tier.bound_key and bound is not None else _shown(value)
            rows.append((f"{label}.{name}", text, name in tier.model_fields_set))
    return rows


def _shown(value: object) -> str:
    if value is None:
        return "-"
    return str(value).lower() if isinstance(value, bool) else str(value)
