# SPDX-License-Identifier: Apache-2.0
"""csrc/bindings/bind_hosts.cc"""

import signal
import threading
import uuid

import pytest
from small_core import MIB, SHARD_BYTES

from kv_offload import _core


def two_hosts(tmp_path):
    """Returns the regions of the scheduler, of rank 0, and of rank 1 on the other host."""
    engine = uuid.uuid4().hex
    ranks = [
        _core.HostRegion.attach_worker(
            f"{engine} {rank}" if rank else engine,
            *(2 * MIB, 2, 2, rank),
            [SHARD_BYTES],
            f"rank {rank}",
            str(tmp_path),
            first_rank=rank,
            local_ranks=1,
        )
        for rank in range(2)
    ]
    scheduler = _core.HostRegion.attach_scheduler(engine, 2 * MIB, 2, 2, str(tmp_path))
    assert scheduler.local_ranks == 1
    return scheduler, *ranks


def test_reports_of_another_host_reach_the_scheduler(tmp_path):
    scheduler, rank_0, rank_1 = two_hosts(tmp_path)
    agent = _core.HostAgent(rank_1, address="127.0.0.1", version="1")
    rank_0.set_endpoint(1, agent.endpoint)
    rank_0.report(0, 5, 1)
    rank_1.report(1, 5, 2)
    links = _core.HostLinks(scheduler, [(1, 1)], version="1")
    assert scheduler.cut_off
    links.wait_until_connected(120)
    assert not scheduler.cut_off
    assert scheduler.geometry(1) == ([SHARD_BYTES], "rank 1")
    assert scheduler.result(5) == 3
    assert links.num_hosts == 1
    assert links.lost_hosts == []
    assert links.take_events() == []
    links.close()
    agent.close()
    assert scheduler.cut_off


def test_a_missing_host_is_named_after_the_wait_which_releases_the_gil(tmp_path):
    scheduler, _, _ = two_hosts(tmp_path)
    links = _core.HostLinks(scheduler, [(1, 1)], version="1")
    others = threading.Event()
    threading.Thread(target=others.set).start()
    with pytest.raises(_core.ResourceError, match=r"the host of rank 1: .*\(waited 0\.3 s\)"):
        links.wait_until_connected(0.3)
    assert others.is_set()
    assert links.lost_hosts == [1]


def test_a_host_that_does_not_fit_ends_the_wait(tmp_path):
    scheduler, rank_0, rank_1 = two_hosts(tmp_path)
    agent = _core.HostAgent(rank_1, address="127.0.0.1", version="2")
    rank_0.set_endpoint(1, agent.endpoint)
    links = _core.HostLinks(scheduler, [(1, 1)], version="1")
    with pytest.raises(_core.ResourceError, match="vllm-kv-offload 2 and this host 1"):
        links.wait_until_connected(120)


@pytest.mark.parametrize("hosts", [[], [(1, 2)], [(2, 1)]])
def test_hosts_with_other_ranks_are_a_value_error(tmp_path, hosts):
    scheduler, _, _ = two_hosts(tmp_path)
    with pytest.raises(ValueError, match=r"(was|were) given"):
        _core.HostLinks(scheduler, hosts, version="1")


def fs_tier(path, **more):
    return _core.FsTier(
        root_dir=str(path), max_bytes=64 * MIB, namespace_id=bytes(32), namespace_json="{}", **more
    )


def connected(tmp_path):
    """Returns the scheduler's region, the agent and the links of two connected hosts."""
    scheduler, rank_0, rank_1 = two_hosts(tmp_path)
    agent = _core.HostAgent(rank_1, address="127.0.0.1", version="1")
    rank_0.set_endpoint(1, agent.endpoint)
    links = _core.HostLinks(scheduler, [(1, 1)], version="1")
    links.wait_until_connected(120)
    return scheduler, agent, links


def cache_over(scheduler, links, tiers):
    return _core.TieredCache(
        scheduler,
        _core.Metrics(),
        group_ids=[0],
        tokens_per_chunk=[16],
        shard_bytes=[[SHARD_BYTES, SHARD_BYTES]],
        tiers=tiers,
        hosts=links,
        hosts_text="a plan",
        hosts_timeout_seconds=120,
    )


def test_the_tiers_of_another_host_are_opened_when_the_scheduler_orders_it(tmp_path):
    scheduler, agent, links = connected(tmp_path)
    requests = []

    def serve():
        requests.append(agent.wait_for_tiers(120))
        round, epochs, _ = requests[0]
        agent.open_tiers(round, epochs, [fs_tier(tmp_path / "host-1")])

    thread = threading.Thread(target=serve)
    thread.start()
    cache = cache_over(scheduler, links, [fs_tier(tmp_path / "host-0")])
    thread.join()
    ((_, ((epoch_id, is_new, replaces),), text),) = requests
    assert (epoch_id > 0, is_new, replaces, text) == (True, False, 0, "a plan")
    assert cache.tier_stats(0)["capacity_bytes"] >= 64 * MIB
    assert (tmp_path / "host-1" / "kv_offload.json").exists()
    cache.close()
    assert agent.wait_for_tiers(0) is None
    assert not agent.is_closed
    agent.close()
    assert agent.is_closed


def test_a_host_that_refuses_its_tiers_fails_the_start_with_its_reason(tmp_path):
    scheduler, agent, links = connected(tmp_path)

    def serve():
        round, epochs, _ = agent.wait_for_tiers(120)
        try:
            agent.open_tiers(round, epochs, [])
        except ValueError as error:
            agent.refuse_tiers(round, str(error))

    thread = threading.Thread(target=serve)
    thread.start()
    with pytest.raises(_core.ResourceError, match=r"host of rank 1 at .*: this host has 0 tiers and the sch"):
        cache_over(scheduler, links, [fs_tier(tmp_path / "host-0")])
    thread.join()


def test_a_signal_ends_the_wait_for_the_tiers_of_another_host(tmp_path):
    scheduler, agent, links = connected(tmp_path)

    def interrupt(*_):
        raise KeyboardInterrupt

    tier = fs_tier(tmp_path / "host-0")
    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(KeyboardInterrupt):
            cache_over(scheduler, links, [tier])  # the other host opens none
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    links.close()
    agent.close()
