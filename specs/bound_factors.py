# SPDX-License-Identifier: Apache-2.0
"""The factors of a calibration in the order of a record's bytes, per cache group."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kv_offload.calibration import Calibration, CalibrationError, PageLayout
from kv_offload.config import OffloadConfig
from kv_offload.namespace import NamespaceIdentity

from .kv_runs import bytes_of


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


def factors_by_group(
    calibration: Calibration,
    groups: Sequence[Any],
    identity: NamespaceIdentity,
    merged: Mapping[str, Any],
    exact: Sequence[bool],
    parallel: Any,
) -> tuple[list[float], ...]:
    """Returns the factors of each group of the OffloadingConfig, for TierSpec.set_bound_factors; [] for
    groups that are stored without loss.

    Raises CalibrationError if the layout of a group is not known, or differs from the calibration.
    """
    if parallel.world_size != parallel.tp_size or getattr(parallel, "dcp_size", 1) != 1:
        raise CalibrationError("a calibration needs ranks that split KV heads only, not layers or tokens")
    canonical = merged.get("canonical")
    parts = int(canonical["shards_per_area"]) if canonical else 1
    found: list[list[float]] = []
    for at, group in enumerate(groups):
        if exact[at]:
            found.append([])
            continue
        try:
            found.append(
                _group_factors(
                    calibration,
                    [_number_of(name) for name in group.layer_names],
                    merged["kv_runs"][at],
                    merged["head_orders"][at],
                    bytes_of(merged["elements"][at]),
                    identity.groups[at].shard_bytes,
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


def _group_factors(
    calibration: Calibration,
    layers: list[int],
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
    shards = len(shard_bytes)
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
    for shard in range(shards):
        first = shard * heads if is_split else shard * total // shards
        factors += calibration.block_factors(layers, page, first, heads)
    block_bytes = len(layers) * page_bytes
    if any(bytes_ % block_bytes for bytes_ in shard_bytes):
        raise CalibrationError(f"its shards of {shard_bytes} bytes are not whole blocks of {block_bytes}")
    return factors
