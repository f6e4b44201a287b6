"""Run by test_contract.py: the order in which a rank's host memory is placed and populated."""

import adapter
import pytest

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


def test_a_kernel_that_refuses_costs_nothing_but_speed() -> None:
    region = Region("mbind: not permitted")
    worker._prepare_memory(region, 0, 1, "cuda", 0, True)
    assert region.calls[-1] == ("prefault", 0)


def test_the_cpu_platform_places_nothing() -> None:
    region = Region()
    worker._prepare_memory(region, 0, 1, "host", -1, True)
    assert region.calls == [("prefault", 0)]
