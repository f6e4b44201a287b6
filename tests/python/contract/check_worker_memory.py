# SPDX-License-Identifier: Apache-2.0
"""Run by test_contract.py: the order in which a rank's host memory is placed and populated."""

from types import SimpleNamespace

import adapter
import pytest
import torch

adapter.use_specs()

from kv_offload.specs import worker  # noqa: E402

from kv_offload import _core  # noqa: E402


class Region:
    area_bytes = 1 << 20

    def __init__(self, refusal: str = "") -> None:
        self.refusal = refusal
        self.calls: list[tuple[str, int]] = []

    def prefer_node(self, index: int, node: int) -> str:
        self.calls.append(("prefer_node", node))
        return self.refusal

    def prefault(self, index: int, threads: int, progress: object) -> None:
        self.calls.append(("prefault", index))


@pytest.fixture(autouse=True)
def _node_3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_core, "cuda_numa_node", lambda device: 3)


def test_memory_is_placed_near_the_gpu_and_then_populated() -> None:
    region = Region()
    worker._prepare_memory(region, 1, 2, "cuda", 0, True)
    assert region.calls == [("prefer_node", 3), ("prefault", 1)]


def test_memory_that_pinning_will_populate_is_placed_too() -> None:
    region = Region()
    worker._prepare_memory(region, 1, 2, "cuda", 0, False)
    assert region.calls == [("prefer_node", 3)]


def test_a_kernel_that_refuses_placement_costs_only_speed() -> None:
    region = Region("mbind: not permitted")
    worker._prepare_memory(region, 0, 1, "cuda", 0, True)
    assert region.calls[-1] == ("prefault", 0)


def test_the_cpu_platform_places_nothing() -> None:
    region = Region()
    worker._prepare_memory(region, 0, 1, "host", -1, True)
    assert region.calls == [("prefault", 0)]


@pytest.mark.parametrize(("rank", "calls"), [(0, ["place", "prefault", "pin"]), (1, ["place", "pin"])])
def test_every_rank_places_a_shared_area_before_it_pins_and_the_first_populates_it(
    monkeypatch: pytest.MonkeyPatch, rank: int, calls: list[str]
) -> None:
    seen: list[str] = []
    region = SimpleNamespace(
        swept=[],
        area_bytes=1 << 20,
        prefer_node=lambda area, node: seen.append("place") or "",
        prefault=lambda area, threads, progress: seen.append("prefault"),
    )

    def pin(*_: object, **__: object) -> SimpleNamespace:
        seen.append("pin")
        return SimpleNamespace(describe=lambda: "cuda")

    monkeypatch.setattr(_core, "HostRegion", SimpleNamespace(attach_worker=lambda *_, **__: region))
    monkeypatch.setattr(_core, "RankWorker", pin)
    monkeypatch.setattr(worker, "choose_copier", lambda tensors: ("cuda", rank))
    monkeypatch.setattr(worker, "groups_of_states", lambda config: [False])
    monkeypatch.setattr(worker, "worker_fingerprint", lambda *_, **__: "")
    tensor = torch.zeros(4, 8)
    config = SimpleNamespace(
        engine_id="engine",
        groups=[SimpleNamespace(tokens_per_block=1)],
        parallel=SimpleNamespace(rank=rank, world_size=2, data_parallel_index=0),
        cache=SimpleNamespace(blocks_per_chunk=1),
    )
    options = SimpleNamespace(
        fixed_weights=False,
        cpu_bytes_to_use=1 << 20,
        huge_pages="",
        keep_host_memory=False,
        share_host_memory=False,
        wait_while_loading="spin",
        prefault=True,
        secondary_tiers=[],
        copy_threads=1,
        copy_kernel_blocks=8,
        metrics_address=lambda *_: None,
        calibration_file=lambda: None,
    )
    caches = SimpleNamespace(
        tensors=[SimpleNamespace(tensor=tensor)],
        group_data_refs=[[SimpleNamespace(tensor_idx=0, page_size_bytes=32)]],
    )
    worker.make_worker(config, options, True, caches)
    assert seen == calls
