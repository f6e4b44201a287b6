# SPDX-License-Identifier: Apache-2.0
"""Run by test_contract.py: the one warning when no lookup ever hits."""

import logging
from types import SimpleNamespace
from typing import Any

import adapter
import pytest

adapter.use_specs()

from kv_offload.specs.watch import (  # noqa: E402
    CodecWatch,
    DivergenceWatch,
    HitWatch,
    HostWatch,
    NeighbourWatch,
    RemovalsWatch,
    Surroundings,
)

from kv_offload import _core  # noqa: E402


class Looked:
    """The lookup statistics of a cache."""

    def __init__(self, *sights: tuple[int, int], longest_prompt: int = 100) -> None:
        self._sights, self._longest_prompt = list(sights), longest_prompt

    def lookup_counts(self) -> list[tuple[int, int]]:
        return self._sights

    def stats(self) -> dict[str, int]:
        return {"longest_prompt": self._longest_prompt}


class Tiers:
    """The tier statistics of a cache."""

    def __init__(self, *apart: bool) -> None:
        self.diverged = list(apart)
        self.encodes = [False] * len(apart)
        self.removals_problem = [""] * len(apart)

    def tier_stats(self, position: int) -> dict[str, Any]:
        encodes = self.encodes[position]
        return {
            "diverged": self.diverged[position],
            "encodes": encodes,
            "removals_problem": self.removals_problem[position],
            "codec_reason": "on: it pays" if encodes else "off",
        }


def _watched(
    *misses: tuple[str, float], hits: float = 0, chunks: float = 10, cache: Any = None, **around: Any
) -> tuple[HitWatch, object]:
    metrics = _core.Metrics()
    metrics.set("kv_offload_tier_chunks", ("cpu",), chunks)
    for reason, tokens in misses:
        metrics.add("kv_offload_miss_tokens_total", (reason,), tokens)
    if hits:
        metrics.add("kv_offload_hit_tokens_total", ("fs",), hits)
    return HitWatch(metrics, ("cpu", "fs"), cache, Surroundings(**around)), metrics


def test_the_watch_warns_once_and_names_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    watch, _ = _watched(("not_stored", 50_000), ("deadline", 200_000))
    for now in (0.0, 100.0, 200.0):
        watch.poll(now)
    (record,) = caplog.records
    assert "none was ever hit" in record.getMessage()
    assert "(deadline): reads take longer than lookup_timeout_ms" in record.getMessage()


@pytest.mark.parametrize(
    ("misses", "hits", "chunks"),
    [
        ([("deadline", 200_000)], 16, 10),  # some lookups hit
        ([("not_stored", 200_000)], 0, 10),  # all prompts are new
        ([("deadline", 200_000)], 0, 0),  # nothing is stored
    ],
)
def test_no_warning_where_misses_are_expected(
    misses: list[tuple[str, float]], hits: float, chunks: float, caplog: pytest.LogCaptureFixture
) -> None:
    watch, _ = _watched(*misses, hits=hits, chunks=chunks)
    watch.poll(0.0)
    watch.poll(100.0)
    assert not caplog.records


NEVER = (("not_stored", 2_000_000),)
DISKS = {"write_policies": ("write_through",)}


@pytest.mark.parametrize(
    ("misses", "cache", "around", "cause"),
    [
        (NEVER, None, {"random_seed": "xxhash", **DISKS}, "set PYTHONHASHSEED"),
        (NEVER, None, {"random_seed": "xxhash"}, "were never stored"),  # no disk: no restart to survive
        (
            NEVER,
            None,
            {"other_namespaces": ("kv_dtype, model.revision",), **DISKS},
            "in kv_dtype, model.revision",
        ),
        (
            NEVER,
            Looked((90, 10), (0, 100)),
            {"group_ids": (0, 2), "other_namespaces": ("kv_dtype",)},
            "cache group 0 are found, but none of group 2",
        ),
        (NEVER, Looked((0, 100), (0, 100)), {"group_ids": (0, 2)}, "were never stored"),
        (
            (("evicted", 300_000),),
            Looked(longest_prompt=9000),
            {"capacity_tokens": 4096},
            "up to 9,000 tokens",
        ),
        ((("evicted", 300_000),), Looked(longest_prompt=900), {"capacity_tokens": 4096}, "evicted before"),
        (
            (("not_stored", 2_000_000), ("evicted", 10)),
            None,
            {"write_policies": ("reuse:3",)},
            "write_policy reuse:3",
        ),
        ((("recompute_cheaper", 300_000),), None, DISKS, "load_policy always"),
        ((("disabled", 300_000),), None, DISKS, "load_policy never"),
    ],
)
def test_the_warning_names_the_cause(
    misses: tuple[tuple[str, float], ...],
    cache: Any,
    around: dict[str, Any],
    cause: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    watch, _ = _watched(*misses, cache=cache, **around)
    watch.poll(0.0)
    (record,) = caplog.records
    assert cause in record.getMessage()


def test_each_tier_with_diverged_replicas_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    tiers = Tiers(False, False)
    watch = DivergenceWatch(tiers, ("fast", "far"))  # type: ignore[arg-type]
    watch.poll()
    assert not caplog.records
    tiers.diverged = [False, True]
    for _ in range(3):
        watch.poll()
    (record,) = caplog.records
    assert "tier far: another replica" in record.getMessage()
    assert "reset_prefix_cache" in record.getMessage()


def test_a_server_that_reports_no_removals_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    tiers = Tiers(False, False)
    watch = RemovalsWatch(tiers, ("fast", "far"))  # type: ignore[arg-type]
    watch.poll()
    assert not caplog.records
    tiers.removals_problem = ["", "the server refused SUBSCRIBE: why"]
    for _ in range(3):
        watch.poll()
    (record,) = caplog.records
    assert record.getMessage().startswith("tier far: ")
    assert "the server refused SUBSCRIBE: why." in record.getMessage()
    tiers.removals_problem = ["", ""]
    watch.poll()
    tiers.removals_problem = ["", "the server refused CLIENT TRACKING: why"]
    watch.poll()
    assert "CLIENT TRACKING" in caplog.records[1].getMessage()


def test_a_change_of_the_compression_decision_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    tiers = Tiers(False, False)
    watch = CodecWatch(tiers, ("fast", "far"))  # type: ignore[arg-type]
    watch.poll()
    assert not caplog.records
    tiers.encodes = [False, True]
    for _ in range(3):
        watch.poll()
    (record,) = caplog.records
    assert record.getMessage() == "tier far: compression is on: it pays"
    tiers.encodes = [False, False]
    watch.poll()
    assert caplog.records[-1].getMessage() == "tier far: compression is off"


class Near:
    """The neighbours of a cache."""

    def __init__(self) -> None:
        self.neighbours, self.problems = 0, list[str]()

    def stats(self) -> dict[str, int]:
        return {"neighbours": self.neighbours}

    def take_neighbour_problems(self) -> list[str]:
        problems, self.problems = self.problems, []
        return problems


@pytest.mark.parametrize(
    ("expects", "found", "levels"),
    [(True, 0, [logging.WARNING]), (True, 1, []), (False, 0, [logging.INFO]), (False, 1, [])],
)
def test_a_server_that_finds_no_other_one_logs_this_once(
    expects: bool, found: int, levels: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    near = Near()
    caplog.set_level(logging.INFO)
    watch = NeighbourWatch(near, expects)  # type: ignore[arg-type]
    watch.poll(5.0)
    near.neighbours = found
    watch.poll(100.0)
    near.neighbours = 0
    assert "found no other one" not in caplog.text
    for now in (125.0, 126.0, 300.0):
        watch.poll(now)
    told = [each.levelno for each in caplog.records if "found no other one in /dev/shm" in each.getMessage()]
    assert told == levels


def test_neighbours_that_are_not_used_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    near = Near()
    near.problems = ["/dev/shm/x is not used: its mode must be 0600"]
    watch = NeighbourWatch(near, False)  # type: ignore[arg-type]
    watch.poll(0.0)
    watch.poll(1.0)
    assert caplog.text.count("share_host_memory: /dev/shm/x is not used") == 1


def test_lost_hosts_are_logged_counted_and_returned(caplog: pytest.LogCaptureFixture) -> None:
    links = SimpleNamespace(num_hosts=2, lost_hosts=[2], events=["lost the connection to the host of rank 1"])
    links.take_events = lambda: [links.events.pop()] if links.events else []
    metrics = _core.Metrics()
    watch = HostWatch(links, metrics)  # type: ignore[arg-type]
    assert not watch.poll()
    connected = "kv_offload_host_connected"
    assert metrics.value("kv_offload_lost_hosts", []) == 1
    assert [metrics.value(connected, [host]) for host in "012"] == [1, 1, 0]
    links.lost_hosts = []
    assert watch.poll()
    assert metrics.value("kv_offload_lost_hosts", []) == 0
    assert [metrics.value(connected, [host]) for host in "012"] == [1, 1, 1]
    assert caplog.text.count("lost the connection to the host of rank 1") == 1
