# SPDX-License-Identifier: Apache-2.0
"""Run by test_contract.py under each vLLM release: engines whose ranks span several hosts, up to the start.

oracle/check_hosts.py runs whole engines.
"""

from types import SimpleNamespace
from typing import Any

import adapter
import pytest

adapter.use_specs()

from kv_offload.specs import KVOffloadSpec, compat, hosts  # noqa: E402
from vllm.config import ParallelConfig  # noqa: E402

from contract.parts import kv_caches, offloading_config  # noqa: E402


def on_hosts(monkeypatch: pytest.MonkeyPatch, parallel: Any) -> None:
    monkeypatch.setattr(compat, "current_vllm_config", lambda: SimpleNamespace(parallel_config=parallel))


def test_ranks_are_on_the_hosts_that_vllm_gives_them(monkeypatch: pytest.MonkeyPatch) -> None:
    parallel = ParallelConfig(tensor_parallel_size=6, distributed_executor_backend="mp")
    parallel.nnodes, parallel.node_rank = 3, 2
    on_hosts(monkeypatch, parallel)
    found = hosts.hosts_of(offloading_config(world_size=6))
    assert found == hosts.Hosts(count=3, own=2, ranks_each=2)
    assert found.first_rank == 4
    assert found.others == [(2, 2), (4, 2)]
    assert found.region_id("engine") != "engine"


@pytest.mark.parametrize(
    "config", [None, SimpleNamespace(), SimpleNamespace(parallel_config=ParallelConfig())]
)
def test_one_host_needs_no_connection(monkeypatch: pytest.MonkeyPatch, config: Any) -> None:
    monkeypatch.setattr(compat, "current_vllm_config", lambda: config)
    assert hosts.hosts_of(offloading_config()) is None


@pytest.mark.parametrize(
    ("setting", "more"),
    [
        (
            "secondary_tiers",
            {"secondary_tiers": [{"type": "fs", "root_dir": "/nowhere", "max_bytes": "1GiB"}]},
        ),
        ("keep_host_memory", {"keep_host_memory": True}),
        ("share_host_memory", {"share_host_memory": True}),
        ("canonical_layout", {"canonical": True}),
        ("a KV cache that all ranks share", {"replicated": True}),
    ],
)
def test_settings_that_need_one_host_are_refused(
    monkeypatch: pytest.MonkeyPatch, setting: str, more: dict[str, Any]
) -> None:
    on_hosts(monkeypatch, SimpleNamespace(nnodes_within_dp=2, node_rank_within_dp=0))
    made = offloading_config(world_size=2, **more)
    with pytest.raises(ValueError, match=f"span 2 hosts, and it was given {setting}"):
        KVOffloadSpec(made).get_worker(kv_caches())


@pytest.mark.parametrize(
    ("given", "expected"), [("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1"), ("::1", "::1")]
)
def test_the_address_of_a_host_is_numeric(given: str, expected: str) -> None:
    assert hosts.numeric_address(lambda: given) in (expected, "::1")


def test_vllm_names_the_address_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.7")
    assert hosts.numeric_address() == "127.0.0.7"


@pytest.mark.parametrize("given", ["0.0.0.0", "::", "no-such-host.invalid"])
def test_an_unusable_address_is_refused(given: str) -> None:
    with pytest.raises(ValueError, match="set VLLM_HOST_IP"):
        hosts.numeric_address(lambda: given)
