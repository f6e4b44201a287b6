# SPDX-License-Identifier: Apache-2.0
"""The factors of a calibration in the order of a record's bytes, per cache group.

In an engine on several hosts, each host has its own copy of the calibration, and computes the factors of its
own ranks. The scheduler sends the digest of its copy, as part of the namespace.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kv_offload.calibration import Calibration, CalibrationError, GroupFactors, PageLayout
from kv_offload.config import OffloadConfig
from kv_offload.namespace import NamespaceIdentity

from .identity import merge_fingerprints
from .kv_runs import bytes_of

if TYPE_CHECKING:
    from kv_offload._core import HostRegion

_MOST_REASON = 200  # characters; the reasons of all groups are in the control page of a rank
_DIGEST_CHARACTERS = 64


# By group position, for the shards of one host; None for groups that are stored without loss.
HostFactors = tuple[GroupFactors | None, ...]


def calibration_for(options: OffloadConfig, identity: NamespaceIdentity) -> Calibration | None:
    """Returns the calibration of the lossy tier; None without one. Raises CalibrationError if it cannot be
    used with this model."""
    path = options.calibration_file()
    if path is None:
        return None
    calibration = Calibration.read(Path(path))
    calibration.refuse_other_model(identity.model)
    return calibration


class HostCalibration:
    """The calibration of a host without the scheduler. One thread."""

    def __init__(self, options: OffloadConfig, region: "HostRegion", ranks: range, parallel: Any) -> None:
        """``ranks``: those of this host, whose layouts ``region`` has. ``parallel``: of the engine."""
        self._path = options.calibration_file()
        self._region = region
        self._ranks = ranks
        self._parallel = parallel
        self._read: Calibration | None = None  # once: the file may be replaced while the engine runs

    def factors(self, identity: NamespaceIdentity, exact: Sequence[bool]) -> HostFactors | None:
        """Returns the factors of this host's ranks; None if the engine has no calibration.

        ``identity``: the namespace of the engine, from the scheduler. ``exact``: see factors_by_group. Raises
        CalibrationError, with both digests, if this host has another calibration than the scheduler's host,
        or only one of them has one.
        """
        theirs = str(identity.settings.get("calibration") or "none")[:_DIGEST_CHARACTERS]
        self._read_once(theirs)
        ours = "none" if self._read is None else self._read.digest
        if ours != theirs:
            raise CalibrationError(
                f"its calibration is {ours} and that of the scheduler's host is {theirs}: copy one "
                'calibration to all hosts, and set "calibration" on all of them'
            )
        if self._read is None:
            return None
        ranks = [self._region.geometry(rank) for rank in self._ranks]
        merged = merge_fingerprints([text for _, text in ranks], first_rank=self._ranks.start)
        shard_bytes = list(zip(*(shards for shards, _ in ranks), strict=True))
        return factors_by_group(self._read, shard_bytes, merged, exact, self._parallel, self._ranks)

    def _read_once(self, theirs: str) -> None:
        if self._path is None or self._read is not None:
            return
        try:
            self._read = Calibration.read(Path(self._path))
        except CalibrationError as error:
            raise CalibrationError(
                f"its calibration cannot be used, and that of the scheduler's host is {theirs}: {error}, or "
                "copy one calibration to all hosts"
            ) from error


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
    shard_bytes: Sequence[Sequence[int]],
    merged: Mapping[str, Any],
    exact: Sequence[bool],
    parallel: Any,
    ranks: range,
) -> HostFactors:
    """Returns the factors of each cache group, for the shards of ``ranks``, which are those of one host.

    ``shard_bytes``: of the shards on this host, by group position. ``merged``: the result of
    merge_fingerprints, of all ranks or of ``ranks``. ``exact``: the groups that are stored without loss.

    Raises CalibrationError if the layout or the layers of a group are not known, or differ from the
    calibration.
    """
    by_tokens = getattr(parallel, "dcp_size", 1) != 1 or getattr(parallel, "pcp_size", 1) != 1
    if parallel.world_size % parallel.tp_size or by_tokens:
        raise CalibrationError("a calibration needs ranks that split layers or KV heads, not tokens")
    canonical = merged.get("canonical")
    parts = int(canonical["shards_per_area"]) if canonical else 1
    seen: set[int] = set()
    found: list[GroupFactors | None] = []
    for at, (shards, is_exact) in enumerate(zip(shard_bytes, exact, strict=True)):
        if is_exact:
            found.append(None)
            continue
        try:
            layers = _layers_by_rank(merged["layers"][at], len(calibration.layers), parallel, ranks, seen)
            found.append(
                _group_factors(
                    calibration,
                    layers,
                    parallel.tp_size,
                    merged["kv_runs"][at],
                    merged["head_orders"][at],
                    bytes_of(merged["elements"][at]),
                    shards,
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


def _numbers_of(report: Sequence[Sequence[int]], count: int) -> list[int]:
    """Returns the layers of a rank. Raises CalibrationError unless all are below ``count``: the reports of
    other hosts come over the network."""
    for first, last in report:
        for number in (first, last):
            if not 0 <= number < count:
                raise CalibrationError(f"the calibration has no layer {number}")
    return [number for first, last in report for number in range(first, last + 1)]


def _layers_by_rank(
    reports: Sequence[Any], count: int, parallel: Any, ranks: range, seen: set[int]
) -> dict[int, list[int]]:
    """Returns the layers of a cache group by rank, for ``ranks``, and adds those of all stages to ``seen``.

    ``reports``: of all ranks or of ``ranks``; None for a rank of another host that has no calibration: that
    host refuses to open its tiers. ``count``: layers of the calibration. vLLM numbers the tensor-parallel
    ranks of a stage consecutively. Raises CalibrationError unless the ranks report exactly that.
    """
    reason = next((report for report in reports if isinstance(report, str)), None)
    if reason is not None:
        raise CalibrationError(reason)
    if len(reports) not in (parallel.world_size, len(ranks)):
        raise CalibrationError(f"{parallel.world_size} ranks with the layers of {len(reports)}")
    first = 0 if len(reports) == parallel.world_size else ranks.start
    by_rank = {
        rank: _numbers_of(report, count) for rank, report in enumerate(reports, first) if report is not None
    }
    missing = [rank for rank in ranks if rank not in by_rank]
    if missing:
        raise CalibrationError(f"rank {missing[0]} has no calibration")
    stages: dict[int, list[int]] = {}
    for rank, layers in by_rank.items():
        if stages.setdefault(rank // parallel.tp_size, layers) != layers:
            raise CalibrationError(f"the ranks of a pipeline stage have different layers: {reports}")
    for layers in stages.values():
        for number in layers:
            if number in seen:
                raise CalibrationError(f"layer {number} is in the cache more than once")
            seen.add(number)
    return {rank: by_rank[rank] for rank in ranks}


def _group_factors(
    calibration: Calibration,
    layers_by_rank: Mapping[int, list[int]],
    tp_size: int,
    runs: Sequence[int],
    order: tuple[int, bool, int] | str,
    element_bytes: int,
    shard_bytes: Sequence[int],
    parts: int,
) -> GroupFactors:
    """``layers_by_rank``: of the ranks of this host. ``parts``: the shards of which a rank's page consists; 1
    without the canonical layout."""
    if isinstance(order, str) or not all(runs):
        raise CalibrationError(f"a calibration is not possible with this cache layout ({order})")
    heads, by_head, page_bytes = order[0] // parts, order[1], order[2] // parts
    if len(shard_bytes) != len(layers_by_rank) * parts:
        raise CalibrationError(f"{len(layers_by_rank)} ranks with shards of {list(shard_bytes)} bytes")
    shards = tp_size * parts  # of a pipeline stage
    used = {number for layers in layers_by_rank.values() for number in layers}
    known = {len(calibration.layers[number].keys) for number in used}
    total = known.pop() if len(known) == 1 else 0
    is_split = heads * shards == total
    if not is_split and not (heads == 1 and total > 0 and shards % total == 0):  # ranks with the same head
        raise CalibrationError(
            f"the calibration has {total or 'different numbers of'} KV heads, the cache {heads * shards}"
        )
    page = PageLayout(runs[0], runs[1], by_head, element_bytes, page_bytes)
    of_shards: list[tuple[list[int], int]] = []  # layers, first head
    for rank, layers in layers_by_rank.items():
        for part in range(parts):
            shard = rank % tp_size * parts + part
            of_shards.append((layers, shard * heads if is_split else shard * total // shards))
    for (layers, _), bytes_ in zip(of_shards, shard_bytes, strict=True):
        if bytes_ % (len(layers) * page_bytes or 1) or bool(layers) != bool(bytes_):
            raise CalibrationError(
                f"a shard of {bytes_} bytes is not whole blocks of {len(layers)} layers of {page_bytes} bytes"
            )
    return calibration.group_factors(of_shards, page, heads)
