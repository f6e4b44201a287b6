# SPDX-License-Identifier: Apache-2.0
"""The factors of a calibration in the order of a record's bytes, per cache group."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kv_offload.calibration import Calibration, CalibrationError, PageLayout
from kv_offload.config import OffloadConfig
from kv_offload.namespace import NamespaceIdentity

from .kv_runs import bytes_of

_MOST_REASON = 200  # characters; the reasons of all groups are in the control page of a rank


def calibration_for(
    options: OffloadConfig, identity: NamespaceIdentity, on_several_hosts: bool
) -> Calibration | None:
    """Returns the calibration of the lossy tier; None without one. Raises CalibrationError if it cannot be
    used with this model or engine."""
    path = options.calibration_file()
    if path is None:
        return None
    if on_several_hosts:
        raise CalibrationError("calibration is not supported for engines whose ranks span several hosts")
    calibration = Calibration.read(Path(path))
    calibration.refuse_other_model(identity.model)
    return calibration


def layer_ranges_of(config: Any) -> list[list[tuple[int, int]] | str]:
    """Returns the numbers of this rank's layers as ranges (first, last) in their order, per group position,
    or the reason why they are not known. Called in the workers: the scheduler only has the layers of rank 0.
    """
    found: list[list[tuple[int, int]] | str] = []
    for group in config.groups:
        ranges: list[tuple[int, int]] = []
        try:
            for number in map(_number_of, group.layer_names):
                if ranges and ranges[-1][1] + 1 == number:
                    ranges[-1] = (ranges[-1][0], number)
                else:
                    ranges.append((number, number))
            found.append(ranges)
        except CalibrationError as reason:
            found.append(str(reason)[:_MOST_REASON])
    return found


def factors_by_group(
    calibration: Calibration,
    identity: NamespaceIdentity,
    merged: Mapping[str, Any],
    exact: Sequence[bool],
    parallel: Any,
) -> tuple[list[float], ...]:
    """Returns the factors of each cache group, for TierSpec.set_bound_factors; [] for groups that are stored
    without loss.

    Raises CalibrationError if the layout or the layers of a group are not known, or differ from the
    calibration.
    """
    if parallel.world_size % parallel.tp_size or getattr(parallel, "dcp_size", 1) != 1:
        raise CalibrationError("a calibration needs ranks that split layers or KV heads, not tokens")
    canonical = merged.get("canonical")
    parts = int(canonical["shards_per_area"]) if canonical else 1
    seen: set[int] = set()
    found: list[list[float]] = []
    for at, (group, is_exact) in enumerate(zip(identity.groups, exact, strict=True)):
        if is_exact:
            found.append([])
            continue
        try:
            stages = _layers_of_stages(merged["layers"][at], parallel, seen)
            found.append(
                _group_factors(
                    calibration,
                    stages,
                    merged["kv_runs"][at],
                    merged["head_orders"][at],
                    bytes_of(merged["elements"][at]),
                    group.shard_bytes,
                    parts,
                )
            )
        except CalibrationError as reason:
            raise CalibrationError(f"cache group {at}: {reason}") from None
    return tuple(found)


def _number_of(name: str) -> int:
    # As vLLM's extract_layer_index.
    found = [int(part) for part in name.split(".") if part.isdigit()]
    if len(found) != 1:
        raise CalibrationError(f"the number of layer {name!r} is not known")
    return found[0]


def _layers_of_stages(reports: Sequence[Any], parallel: Any, seen: set[int]) -> list[list[int]]:
    """Returns the layers of a cache group by pipeline stage, from the reports of all ranks, and adds them to
    ``seen``.

    vLLM numbers the tensor-parallel ranks of a stage consecutively. Raises CalibrationError unless the ranks
    report exactly that.
    """
    reason = next((report for report in reports if isinstance(report, str)), None)
    if reason is not None:
        raise CalibrationError(reason)
    ranks = [[number for first, last in report for number in range(first, last + 1)] for report in reports]
    stages = ranks[:: parallel.tp_size]
    if len(ranks) != parallel.world_size or any(
        layers != stages[rank // parallel.tp_size] for rank, layers in enumerate(ranks)
    ):
        raise CalibrationError(f"the ranks of a pipeline stage have different layers: {reports}")
    for layers in stages:
        for number in layers:
            if number in seen:
                raise CalibrationError(f"layer {number} is in the cache more than once")
            seen.add(number)
    if len({len(layers) for layers in stages}) != 1:
        raise CalibrationError(
            f"a calibration needs the same number of layers in each pipeline stage, not "
            f"{[len(layers) for layers in stages]}; set VLLM_PP_LAYER_PARTITION or another pipeline size"
        )
    return stages


def _group_factors(
    calibration: Calibration,
    stages: list[list[int]],
    runs: Sequence[int],
    order: tuple[int, bool, int] | str,
    element_bytes: int,
    shard_bytes: Sequence[int],
    parts: int,
) -> list[float]:
    """``parts``: the shards of which a rank's page consists; 1 without the canonical layout."""
    if isinstance(order, str) or not all(runs):
        raise CalibrationError(f"a calibration is not possible with this cache layout ({order})")
    heads, by_head, page_bytes = order[0] // parts, order[1], order[2] // parts
    if len(shard_bytes) % len(stages) or len(set(shard_bytes)) != 1 or (parts != 1 and len(stages) != 1):
        raise CalibrationError(f"{len(stages)} pipeline stages with shards of {list(shard_bytes)} bytes")
    shards = len(shard_bytes) // len(stages)  # of a stage
    layers = [number for stage in stages for number in stage]
    for number in layers:
        if number >= len(calibration.layers):
            raise CalibrationError(f"the calibration has no layer {number}")
    known = {len(calibration.layers[number].keys) for number in layers}
    total = known.pop() if len(known) == 1 else 0
    is_split = heads * shards == total
    if not is_split and not (heads == 1 and total > 0 and shards % total == 0):  # ranks with the same head
        raise CalibrationError(
            f"the calibration has {total or 'different numbers of'} KV heads, the cache {heads * shards}"
        )
    page = PageLayout(runs[0], runs[1], by_head, element_bytes, page_bytes)
    factors: list[float] = []
    for stage in stages:
        for shard in range(shards):
            first = shard * heads if is_split else shard * total // shards
            factors += calibration.block_factors(stage, page, first, heads)
    block_bytes = len(stages[0]) * page_bytes
    if any(bytes_ % block_bytes for bytes_ in shard_bytes):
        raise CalibrationError(f"its shards of {shard_bytes} bytes are not whole blocks of {block_bytes}")
    return factors
