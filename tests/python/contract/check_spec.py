# SPDX-License-Identifier: Apache-2.0
"""Run by test_contract.py under each vLLM release: the spec, up to the startup summary."""

import gc
import json
import subprocess
import sys
import uuid
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import adapter
import pytest
import torch

adapter.use_specs()

from kv_offload.specs import KVOffloadSpec, compat, identity, plugin, spec  # noqa: E402
from kv_offload.specs.canonical import CanonicalPages  # noqa: E402
from kv_offload.specs.identity_table import ENVIRONMENT  # noqa: E402
from kv_offload.specs.load_spec import RowLoadStoreSpec  # noqa: E402
from kv_offload.specs.message_wait import FetchAwareWait  # noqa: E402
from vllm.v1.kv_offload import base  # noqa: E402
from vllm.v1.kv_offload.factory import OffloadingSpecFactory  # noqa: E402

from contract.parts import blocks, context, keys, kv_caches, offloading_config  # noqa: E402
from kv_offload import _core  # noqa: E402
from kv_offload.config import OffloadConfig  # noqa: E402


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec, "RANKS_DEADLINE_SECONDS", 0.2)


def test_the_plugin_registers_once_and_the_name_alone_is_enough() -> None:
    plugin.register()
    plugin.register()
    assert OffloadingSpecFactory.get_spec_cls({"spec_name": "KVOffloadSpec"}) is KVOffloadSpec


def test_the_module_path_alone_is_enough() -> None:
    OffloadingSpecFactory._registry.pop("KVOffloadSpec", None)
    extra = {"spec_name": "KVOffloadSpec", "spec_module_path": "kv_offload.specs"}
    assert OffloadingSpecFactory.get_spec_cls(extra) is KVOffloadSpec


def test_an_import_loads_no_extension_and_starts_no_thread() -> None:
    program = (
        "import sys, threading, adapter; adapter.use_specs(); import vllm.v1.kv_offload.factory as f\n"
        "before = threading.active_count()\n"
        "f.OffloadingSpecFactory.get_spec_cls({'spec_name': 'KVOffloadSpec', "
        "'spec_module_path': 'kv_offload.specs'})\n"
        "assert 'kv_offload._core' not in sys.modules and threading.active_count() == before"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(adapter.__file__).parent)


def test_every_metric_is_declared_to_vllm() -> None:
    declared = KVOffloadSpec.build_metric_definitions({"cpu_bytes_to_use": 1})
    kinds = {
        "counter": base.OffloadingCounterMetadata,
        "gauge": base.OffloadingGaugeMetadata,
        "histogram": base.OffloadingHistogramMetadata,
    }
    of_core = {definition.name: definition for definition in _core.metric_definitions()}
    assert set(declared) == {name for name, definition in of_core.items() if not definition.worker}
    for name, metadata in declared.items():
        assert isinstance(metadata, kinds[of_core[name].type])
        assert metadata.documentation
        assert metadata.labelnames == tuple(of_core[name].labels)
    assert declared["kv_offload_read_seconds"].buckets


def test_one_error_lists_all_problems_of_a_configuration() -> None:
    with pytest.raises(ValueError, match="2 problems") as caught:
        KVOffloadSpec(offloading_config(cpu_bytes_to_use="much", eviction="lru"))
    assert "cpu_bytes_to_use" in str(caught.value)
    assert "eviction_policy" in str(caught.value)  # the nearest known key


def test_a_replicated_cache_has_one_area() -> None:
    made = KVOffloadSpec(offloading_config(world_size=2, replicated=True))
    assert made.replicated_layout is True
    assert made.num_areas == 1
    assert KVOffloadSpec(offloading_config(world_size=2)).num_areas == 2


def test_in_the_canonical_layout_rank_0_stores_a_replicated_cache_and_all_ranks_report() -> None:
    """In this case vLLM sends the stores to every rank."""
    engine = offloading_config().engine_id
    setting = {"world_size": 2, "replicated": True, "canonical": True, "engine_id": engine}
    workers = [
        KVOffloadSpec(offloading_config(rank=rank, **setting)).get_worker(kv_caches()) for rank in (0, 1)
    ]
    stored = [worker._rank_worker for worker in workers]
    submitted: list[int] = []
    for rank, worker in enumerate(workers):
        worker._rank_worker = SimpleNamespace(
            submit=lambda *_, rank=rank, **__: submitted.append(rank), poll=lambda: []
        )
        assert worker.submit_store(7, blocks([1]), RowLoadStoreSpec(1, [0], [1])) is True
    assert submitted == [0]
    assert [result.job_id for result in workers[1].get_finished()] == [7]
    assert workers[1].get_finished() == []
    for worker, rank_worker in zip(workers, stored, strict=True):
        worker._rank_worker = rank_worker
        worker.shutdown()


def test_a_cache_without_a_canonical_layout_is_kept_apart_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = offloading_config(canonical=True)
    worker = KVOffloadSpec(config).get_worker(kv_caches())
    manager = KVOffloadSpec(config).get_manager()
    assert "canonical_layout is not possible here, so records are not shared" in caplog.text
    assert "kept apart: " in manager._options.info["layout"]
    worker.shutdown()


def test_a_kept_region_is_found_by_the_weights_name_not_by_their_path() -> None:
    def found_by(name: str, replica: int = 0, **settings: Any) -> str:
        model, parallel = SimpleNamespace(name=name), SimpleNamespace(data_parallel_index=replica)
        options = OffloadConfig.from_extra_config({"cpu_bytes_to_use": "1GiB", **settings})
        return identity.keep_for(SimpleNamespace(model=model, parallel=parallel), options)

    kept = {"keep_host_memory": True}
    assert found_by("a") == ""
    assert found_by("a", **kept) == found_by("a", **kept) != found_by("b", **kept)
    assert found_by("a", 1, **kept) != found_by("a", 0, **kept)
    named = kept | {"model_id": "weights of May"}
    assert found_by("/models/1", **named) == found_by("/models/2", **named) != found_by("/models/1", **kept)


def test_a_region_that_cannot_be_kept_is_not_logged_as_kept(caplog: pytest.LogCaptureFixture) -> None:
    stats = {"taken_over_chunks": 3, "resident_bytes": 12288}
    with caplog.at_level("INFO", logger="vllm.kv_offload"):
        spec._log_kept(stats | {"is_kept": False})
        assert "freed when this server ends" in caplog.text
        assert "outlives" not in caplog.text
        caplog.clear()
        spec._log_kept(stats | {"is_kept": True})
        assert "found 3 chunks" in caplog.text


@pytest.mark.parametrize(("size", "rank", "lines"), [(None, 0, 0), (1.5, 0, 1), (1.5, 1, 0)])
def test_a_setting_that_the_size_option_overwrites_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, size: Any, rank: int, lines: int
) -> None:
    cache = SimpleNamespace(kv_offloading_size=size)
    monkeypatch.setattr(compat, "current_vllm_config", lambda: SimpleNamespace(cache_config=cache))
    # Logged before the rest of the configuration is checked, which ends this worker here.
    monkeypatch.setattr("kv_offload.specs.worker.choose_copier", lambda _: (_ for _ in ()).throw(KeyError))
    with caplog.at_level("INFO", logger="vllm.kv_offload"), pytest.raises(KeyError):
        KVOffloadSpec(offloading_config(rank=rank, world_size=2)).get_worker(kv_caches())
    said = [
        text
        for text in caplog.messages
        if "--kv-offloading-size 1.5 sets cpu_bytes_to_use to 1.5 GiB" in text
    ]
    assert len(said) == lines


def test_ranks_with_different_layouts_are_refused() -> None:
    config, pages = offloading_config(), [[4096]]
    canonical = CanonicalPages(2, 1, ((8192,),))
    texts = [
        identity.worker_fingerprint(config, "cpu", "host", pages, 8, each) for each in (canonical, "why not")
    ]
    with pytest.raises(ValueError, match="rank 1 has canonical None"):
        identity.merge_fingerprints(texts)


def connector_of(spec_name: str) -> dict[str, Any]:
    return {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"spec_name": spec_name}}


@pytest.mark.parametrize("other", ["CPUOffloadingSpec", "KVOffloadSpec"])
def test_a_second_offloading_connector_is_refused(monkeypatch: pytest.MonkeyPatch, other: str) -> None:
    connectors = [connector_of(other), connector_of("KVOffloadSpec")]
    transfer = SimpleNamespace(
        kv_connector="MultiConnector", kv_connector_extra_config={"connectors": connectors}
    )
    monkeypatch.setattr(compat, "current_vllm_config", lambda: SimpleNamespace(kv_transfer_config=transfer))
    with pytest.raises(ValueError, match=f"2 OffloadingConnectors \\(spec_name {other}, KVOffloadSpec\\)"):
        KVOffloadSpec(offloading_config()).get_worker(kv_caches())


def test_ranks_that_do_not_attach_are_named() -> None:
    engine = offloading_config().engine_id
    KVOffloadSpec(offloading_config(world_size=2, engine_id=engine)).get_worker(kv_caches())
    with pytest.raises(_core.ResourceError, match=r"1.*If these ranks run on other hosts, use --nnodes"):
        KVOffloadSpec(offloading_config(world_size=2, engine_id=engine)).get_manager()


def test_manager_and_worker_are_created_once() -> None:
    config = offloading_config()
    worker_side, scheduler_side = KVOffloadSpec(config), KVOffloadSpec(config)
    caches = kv_caches()
    assert worker_side.get_worker(caches) is worker_side.get_worker(caches)
    assert scheduler_side.get_manager() is scheduler_side.get_manager()
    worker_side.get_worker(caches).shutdown()
    scheduler_side.get_manager().shutdown()


@pytest.mark.parametrize("manager_first", [True, False])
def test_manager_and_worker_wait_as_configured_while_they_run(manager_first: bool) -> None:
    queues = compat.message_queues()
    assert queues is not None
    gc.collect()  # an earlier check may have left an engine uncollected
    own = queues.sched_yield
    assert not isinstance(own, FetchAwareWait)

    def made(how: str) -> list[Any]:
        config = offloading_config(wait_while_loading=how)
        worker = KVOffloadSpec(config).get_worker(kv_caches())
        of_worker = queues.sched_yield
        manager = KVOffloadSpec(config).get_manager()
        of_manager = queues.sched_yield
        assert [of_worker is not own, of_manager is not of_worker] == [how == "auto"] * 2
        assert how == "spin" or isinstance(of_manager, FetchAwareWait)
        return [manager, worker] if manager_first else [worker, manager]

    for how in ("auto", "spin"):
        first, second = made(how)
        first.shutdown()
        second.shutdown()
        assert queues.sched_yield is own


@pytest.mark.parametrize("how", ["spin", "auto"])
def test_host_memory_is_freed_with_a_manager_and_worker_that_were_not_shut_down(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers an engine that is deleted in its user's process, or whose later startup fails."""
    regions: list[Any] = []
    attach = KVOffloadSpec._attach

    def attached(made: Any) -> Any:
        region, *rest = attach(made)
        regions.append(weakref.ref(region))
        return region, *rest

    monkeypatch.setattr(KVOffloadSpec, "_attach", attached)
    config = offloading_config(wait_while_loading=how)
    worker = KVOffloadSpec(config).get_worker(kv_caches())
    manager = KVOffloadSpec(config).get_manager()
    assert manager is not None
    regions.append(weakref.ref(worker.region))
    del worker, manager
    gc.collect()
    assert [region() for region in regions] == [None, None]


def test_the_startup_summary_shows_capacity_in_bytes_and_tokens(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    config = offloading_config()
    made = KVOffloadSpec(config).get_worker(kv_caches())
    manager = KVOffloadSpec(config).get_manager()
    (line,) = [r.getMessage() for r in caplog.records if r.name == "vllm.kv_offload.specs.spec"]
    assert "cpu 1.0 MiB = 4,096 tokens" in line
    assert "copier host" in line
    assert "namespace" in line
    made.shutdown()
    manager.shutdown()


@pytest.mark.parametrize(("longest", "told"), [(4096, False), (4097, True)])
def test_a_capacity_below_one_prompt_is_logged_at_start(
    longest: int, told: bool, vllm_config: Any, caplog: pytest.LogCaptureFixture
) -> None:
    vllm_config.model_config.max_model_len = longest
    config = offloading_config()
    made = KVOffloadSpec(config).get_worker(kv_caches())
    KVOffloadSpec(config).get_manager().shutdown()
    made.shutdown()
    assert ("hold 4,096 tokens, and a prompt may have 4,097" in caplog.text) == told


def _namespace(config: Any, world_size: int = 1) -> str:
    texts = [identity.worker_fingerprint(config, "cpu", "host", [[4096]], 100) for _ in range(world_size)]
    merged = identity.merge_fingerprints(texts)
    made, _ = identity.namespace_identity(config, [[4096] * world_size], merged, False)
    return made.short_id()


def test_settings_that_change_the_bytes_change_the_namespace(vllm_config: Any) -> None:
    def changed(where: Any, name: str, value: Any) -> str:
        before = getattr(where, name)
        setattr(where, name, value)
        found = _namespace(offloading_config())
        setattr(where, name, before)
        return found

    plain = _namespace(offloading_config())
    assert plain == _namespace(offloading_config())
    others = [
        changed(vllm_config.model_config, "revision", "def"),
        changed(vllm_config.model_config, "dtype", "torch.float32"),
        changed(vllm_config.model_config, "quantization", "fp8"),
        changed(vllm_config.model_config, "hf_overrides", {"rope_theta": 1}),
        changed(vllm_config.cache_config, "prefix_caching_hash_algo", "sha256_cbor"),
        _namespace(offloading_config(blocks_per_chunk=2)),
        _namespace(offloading_config(world_size=2), world_size=2),
    ]
    assert len({plain, *others}) == 1 + len(others)


def test_settings_that_keep_the_bytes_keep_the_namespace(vllm_config: Any) -> None:
    plain = _namespace(offloading_config())
    vllm_config.model_config.max_model_len = 200
    assert _namespace(offloading_config(cpu_bytes_to_use="2MiB", load_policy="never")) == plain


def test_max_model_len_changes_the_namespace_where_it_selects_the_rotation(vllm_config: Any) -> None:
    vllm_config.model_config.hf_text_config = SimpleNamespace(rope_scaling={"rope_type": "longrope"})
    plain = _namespace(offloading_config())
    vllm_config.model_config.max_model_len = 200
    assert _namespace(offloading_config()) != plain


def test_a_description_that_is_too_long_is_replaced_by_a_digest(
    vllm_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm_config.model_config.hf_overrides = {"long": "x" * 10_000}
    many = [name for name, decision in ENVIRONMENT.items() if decision.counts]
    for number, name in enumerate(many):
        monkeypatch.setenv(name, str(number))
        text = identity.worker_fingerprint(offloading_config(), "cpu", "host", [[4096]], 100)
        assert len(text.encode()) <= identity.MAX_FINGERPRINT_BYTES
    assert json.loads(text)["settings"].keys() == {"digest"}


def test_every_rank_and_start_agrees_on_using_a_digest(
    vllm_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name, decision in ENVIRONMENT.items() if decision.counts]:
        monkeypatch.setenv(name, "1")
        ranks = [
            json.loads(identity.worker_fingerprint(offloading_config(), "cpu", "host", [[4096]], blocks))
            for blocks in (1, 10**60)
        ]
        assert ranks[0]["settings"] == ranks[1]["settings"]


def test_state_groups_are_recognised_by_their_layers(vllm_config: Any) -> None:
    """In mode "align" a chunk of a Mamba cache keeps only its last block; in other modes, and for other
    caches, it keeps all.
    """
    from vllm.v1.kv_cache_interface import MambaSpec

    def layer(mode: str) -> Any:
        spec = MambaSpec(block_size=16, shapes=((8,),), dtypes=(torch.float32,), mamba_cache_mode=mode)
        return SimpleNamespace(get_kv_cache_spec=lambda _: spec)

    layers = vllm_config.compilation_config.static_forward_context
    config = offloading_config(groups=3, blocks_per_chunk=4)
    assert identity.groups_of_states(config) == [False] * 3, "no layer declares a state"
    layers |= {"layer.0": layer("align"), "layer.1": layer("all")}
    assert identity.groups_of_states(config) == [True, False, False]
    made = KVOffloadSpec(config).get_worker(kv_caches(groups=3))
    shards, _ = made.region.geometry(0)
    assert shards == [4096, 4 * 4096, 4 * 4096]
    made.shutdown()


def test_ranks_with_different_chunks_are_refused() -> None:
    texts = [
        identity.worker_fingerprint(offloading_config(blocks_per_chunk=each), "cpu", "host", [[4096]], 100)
        for each in (1, 4)
    ]
    with pytest.raises(ValueError, match="rank 1 has blocks_per_chunk 4, rank 0 has 1"):
        identity.merge_fingerprints(texts)


def test_a_group_has_only_what_holds_on_all_ranks() -> None:
    fingerprint = json.loads(
        identity.worker_fingerprint(offloading_config(), "cpu", "host", [[4096]], 100, None, [(128, 128)])
    )
    kinds = ({"elements": ["bfloat16"], "may_lose": [True]}, {"elements": ["float16"], "may_lose": [False]})
    first, second = (
        json.dumps(fingerprint | kind | {"windowed": [windowed]})
        for kind, windowed in zip(kinds, (False, True), strict=True)
    )
    for texts in ((first, second), (second, first)):
        merged = identity.merge_fingerprints(texts)
        assert (merged["elements"], merged["may_lose"], merged["windowed"]) == (["bytes"], [False], [True])
    alike = identity.merge_fingerprints([first, first])
    assert (alike["elements"], alike["may_lose"], alike["windowed"]) == (["bfloat16"], [True], [False])


def test_ranks_with_different_hash_algorithms_are_refused(vllm_config: Any) -> None:
    first = identity.worker_fingerprint(offloading_config(), "cpu", "host", [[4096]], 100)
    vllm_config.cache_config.prefix_caching_hash_algo = "sha256_cbor"
    second = identity.worker_fingerprint(offloading_config(), "cpu", "host", [[4096]], 100)
    with pytest.raises(ValueError, match="rank 1 has hash_algorithm 'sha256_cbor', rank 0 has 'sha256'"):
        identity.merge_fingerprints([first, second])


def test_the_smallest_rank_cache_bounds_the_engine(vllm_config: Any) -> None:
    texts = [identity.worker_fingerprint(offloading_config(), "cpu", "host", [[4096]], n) for n in (300, 200)]
    assert identity.merge_fingerprints(texts)["cache_blocks"] == 200


def test_a_seed_that_differs_between_processes_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils

    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    seed, is_random = compat.block_hash_seed("sha256")
    kv_cache_utils.init_none_hash(get_hash_fn_by_name("sha256"))
    assert (seed, is_random) == (kv_cache_utils.NONE_HASH.hex(), False)
    monkeypatch.setattr(kv_cache_utils, "resolve_none_hash_seed", lambda _: uuid.uuid4().hex)
    assert compat.block_hash_seed("sha256")[1] is True


@pytest.mark.usefixtures("vllm_config")
def test_a_random_seed_with_a_disk_logs_a_loud_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compat, "block_hash_seed", lambda _: ("00", True))
    tiers = [{"type": "fs", "root_dir": str(tmp_path / "root"), "max_bytes": "16MiB"}]
    config = offloading_config(secondary_tiers=tiers, model_id="model")
    made = KVOffloadSpec(config).get_worker(kv_caches())
    manager = KVOffloadSpec(config).get_manager()
    assert "NEVER BE FOUND AGAIN" in caplog.text
    made.shutdown()
    manager.shutdown()


def test_weights_without_identity_are_refused_until_they_are_named(tmp_path: Path, vllm_config: Any) -> None:
    vllm_config.model_config.model_weights = "s3://bucket/llama"
    tiers = [{"type": "fs", "root_dir": str(tmp_path / "root"), "max_bytes": "16MiB"}]
    config = offloading_config(secondary_tiers=tiers)
    made = KVOffloadSpec(config).get_worker(kv_caches())
    with pytest.raises(ValueError, match=r'at s3://bucket/llama.*"model_id"'):
        KVOffloadSpec(config).get_manager()
    made.shutdown()
    config = offloading_config(secondary_tiers=tiers, model_id="llama 2026-01")
    made = KVOffloadSpec(config).get_worker(kv_caches())
    KVOffloadSpec(config).get_manager().shutdown()
    made.shutdown()
    config = offloading_config()  # host memory alone ends with the process
    made = KVOffloadSpec(config).get_worker(kv_caches())
    KVOffloadSpec(config).get_manager().shutdown()
    made.shutdown()
    config = offloading_config(keep_host_memory=True)  # unless it is kept
    made = KVOffloadSpec(config).get_worker(kv_caches())
    with pytest.raises(ValueError, match="keep_host_memory lets the cache outlive this server"):
        KVOffloadSpec(config).get_manager()
    made.shutdown()


def test_the_key_of_a_kept_region_depends_on_model_and_engine() -> None:
    def found_by(config: Any, **options: Any) -> str:
        return identity.keep_for(config, OffloadConfig(cpu_bytes_to_use=1 << 20, **options))

    config = offloading_config()
    assert found_by(config) == ""
    kept = found_by(config, keep_host_memory=True)
    assert kept == found_by(offloading_config(), keep_host_memory=True) != ""
    assert kept != found_by(config, keep_host_memory=True, model_id="others")
    second = replace(config, parallel=replace(config.parallel, data_parallel_index=1))
    assert kept != found_by(second, keep_host_memory=True)


def test_data_parallel_ranks_share_memory_and_keep_their_own() -> None:
    both = OffloadConfig(cpu_bytes_to_use=1 << 20, keep_host_memory=True, share_host_memory=True)
    first = offloading_config()
    second = replace(first, parallel=replace(first.parallel, data_parallel_index=1))
    assert identity.share_for(first, both) == identity.share_for(second, both) != ""
    assert identity.keep_for(first, both) != identity.keep_for(second, both)


def test_the_address_of_the_weights_is_in_the_namespace(vllm_config: Any) -> None:
    """For an s3:// model, vLLM replaces the model name by a directory of config files."""
    found = []
    for address in ("s3://bucket/base", "s3://bucket/tuned"):
        vllm_config.model_config.model_weights = address
        found.append(_namespace(offloading_config()))
    vllm_config.model_config.model_weights = ""
    vllm_config.load_config.model_loader_extra_config = {"tensorizer_uri": "s3://bucket/base.tensors"}
    found.append(_namespace(offloading_config()))
    assert len(set(found)) == 3


@pytest.mark.parametrize("key", ["tensorizer_uri", "tensorizer_dir"])
def test_the_address_of_the_weights_is_the_one_that_tensorizer_reads(vllm_config: Any, key: str) -> None:
    """The settings as EngineArgs.create_load_config leaves them; the default address is the model itself."""
    vllm_config.model_config.model = "/models/base"
    for given, address in (({key: "s3://bucket/base"}, "s3://bucket/base"), ({}, None)):
        table = {"tensorizer_dir": "/models/base", **given}
        vllm_config.load_config.model_loader_extra_config = {**given, "tensorizer_config": table}
        text = identity.worker_fingerprint(offloading_config(), "cpu", "host", [[4096]], 100)
        assert json.loads(text)["model"]["address"] == address


def test_a_root_that_cannot_be_used_is_refused_before_memory_is_taken(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    tiers = [{"type": "fs", "root_dir": str(tmp_path / "file"), "max_bytes": "16MiB"}]
    with pytest.raises(ValueError, match="is not a directory"):
        KVOffloadSpec(offloading_config(secondary_tiers=tiers)).get_worker(kv_caches())


def test_a_request_works_with_the_spec_alone() -> None:
    config = offloading_config(groups=2)
    made = KVOffloadSpec(config).get_worker(kv_caches(groups=2))
    manager = KVOffloadSpec(config).get_manager()
    request = context()
    assert manager.on_new_request(request).policy is base.OffloadPolicy.CHUNK_LEVEL
    output = manager.prepare_store([*keys(1, 2, group=3), *keys(1, group=4)], request)
    assert output.store_spec.group_rows == (2, 1)
    made.shutdown()
    manager.shutdown()
