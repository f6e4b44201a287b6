# SPDX-License-Identifier: Apache-2.0
"""The configuration: accepted values, refused values, and the errors for the operator."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from live_root import used_bytes

from kv_offload.config import EVICTION_POLICIES, ConfigError, OffloadConfig
from kv_offload.config_compat import multi_connector_problems
from kv_offload.machine import cautions, check_machine, tier_bounds
from kv_offload.tiers.fs.config import FsTierConfig, held_bytes
from kv_offload.vllm_versions import keys_read_by_vllm

GIB = 1 << 30
FS = {"type": "fs", "root_dir": "/var/cache/kv"}


def read(**extra):
    return OffloadConfig.from_extra_config({"cpu_bytes_to_use": GIB} | extra)


def problems(extra):
    with pytest.raises(ConfigError) as caught:
        OffloadConfig.from_extra_config(extra)
    return caught.value.problems


def test_a_minimal_configuration_has_three_keys():
    config = OffloadConfig.from_extra_config(
        {
            "spec_name": "KVOffloadSpec",
            "spec_module_path": "kv_offload.specs",
            "cpu_bytes_to_use": "32GiB",
            "secondary_tiers": [FS | {"max_bytes": "500GiB"}],
        }
    )
    assert config.cpu_bytes_to_use == 32 * GIB
    assert config.secondary_tiers == (FsTierConfig(root_dir="/var/cache/kv", max_bytes=500 * GIB),)
    assert (config.eviction_policy, config.load_policy, config.metrics_port) == ("prefix", "auto", None)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (3 << 20, 3 << 20),
        (2.0 * GIB, 2 * GIB),
        ("1e9", 10**9),
        ("1.5 KiB", 1536),
        ("32GB", 32 * 10**9),
        ("32G", 32 * 10**9),
        ("32Gi", 32 * GIB),
        ("512 Mi", 512 << 20),
        ("7b", 7),
    ],
)
def test_sizes_are_parsed_with_common_units(given, expected):
    assert read(cpu_bytes_to_use=given).cpu_bytes_to_use == expected


@pytest.mark.parametrize(
    "given", [True, float("inf"), "32gigs", "", "-1", " 1", "+1", "nan", "inf", "1e400", None, [1]]
)
def test_an_invalid_size_is_refused_and_quoted(given):
    (problem,) = problems({"cpu_bytes_to_use": given})
    assert problem.startswith("cpu_bytes_to_use")
    assert repr(given) in problem
    assert "32GiB" in problem


@pytest.mark.parametrize("given", [32, 1, (1 << 20) - 1, 32.0, "32", "1e3"])
def test_a_size_below_a_mebibyte_without_a_unit_is_refused(given):
    (problem,) = problems({"cpu_bytes_to_use": given})
    assert "has no unit; below 1 MiB a size needs one, such as 32GiB" in problem
    tier = FS | {"max_bytes": given}
    (problem,) = problems({"cpu_bytes_to_use": GIB, "secondary_tiers": [tier]})
    assert "secondary_tiers[0].max_bytes" in problem


def test_policies_are_those_of_the_core():
    core = pytest.importorskip("kv_offload._core", reason="the core is not built")
    assert list(EVICTION_POLICIES) == core.eviction_policy_names()


def test_a_missing_size_is_refused_with_an_example():
    (problem,) = problems({})
    assert "cpu_bytes_to_use is required" in problem
    assert "32GiB" in problem


@pytest.mark.parametrize("given", [0, "0GiB", -5])
def test_no_memory_at_all_is_refused(given):
    assert problems({"cpu_bytes_to_use": given})[0].startswith("cpu_bytes_to_use")


def test_unknown_key_names_the_nearest_and_all():
    (problem,) = problems({"cpu_bytes_to_use": GIB, "secondary_teirs": []})
    assert "'secondary_teirs' is not known" in problem
    assert "did you mean 'secondary_tiers'?" in problem
    assert "lookup_timeout_ms" in problem
    assert "blocks_per_chunk" in problem


def test_unknown_tier_key_names_the_tier_and_the_nearest():
    tiers = [FS, {"type": "fs", "root_dir": "/other", "maxbytes": 1}]
    (problem,) = problems({"cpu_bytes_to_use": GIB, "secondary_tiers": tiers})
    assert problem.startswith("secondary_tiers[1]: 'maxbytes' is not known; did you mean 'max_bytes'?")


def test_a_tier_key_outside_of_a_tier_is_refused_with_its_place():
    (problem,) = problems({"cpu_bytes_to_use": GIB, "n_read_threads": 4})
    assert problem == "'n_read_threads' belongs in a tier: secondary_tiers[...].n_read_threads"


def test_all_problems_are_reported_at_once():
    text = "\n".join(
        problems(
            {
                "eviction": 1,
                "load_policy": "sometimes",
                "secondary_tiers": [{"type": "fs"}, FS | {"fsync": "maybe", "write_policy": "reuse:0"}],
            }
        )
    )
    for part in (
        "'eviction' is not known; did you mean 'eviction_policy'?",
        "load_policy is 'sometimes'; it should be 'auto', 'always' or 'never'",
        "cpu_bytes_to_use is required",
        "secondary_tiers[0].root_dir is required",
        "secondary_tiers[1].fsync is 'maybe'; it should be 'none', 'data' or 'full'",
        "secondary_tiers[1].write_policy: is 'reuse:0'; possible: write_through, on_evict, reuse:N",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("tier", "part"),
    [
        ("fs", "must be a table"),
        ({}, "has no type"),
        ({"type": "obj", "bucket": "b"}, "type 'obj'; possible: fs, redis, s3, mooncake (use s3"),
        ({"type": "p2p"}, "type 'p2p'; possible: fs, redis, s3, mooncake (use mooncake or redis"),
        ({"type": "kvcr"}, "type 'kvcr'; possible: fs, redis, s3, mooncake (use mooncake or redis"),
        ({"type": "example"}, "type 'example'"),
        ({"type": "MyTier", "module_path": "m"}, "type 'MyTier'; possible: fs, redis, s3, mooncake, such as"),
    ],
)
def test_an_unknown_tier_type_is_refused_with_the_valid_ones(tier, part):
    (problem,) = problems({"cpu_bytes_to_use": GIB, "secondary_tiers": [tier]})
    assert problem.startswith("secondary_tiers[0]")
    assert part in problem
    assert '"type": "fs"' in problem


def test_tiers_must_be_a_list():
    (problem,) = problems({"cpu_bytes_to_use": GIB, "secondary_tiers": FS})
    assert "secondary_tiers is dict; it must be a list" in problem


def test_two_tiers_must_have_different_roots():
    (problem,) = problems(
        {"cpu_bytes_to_use": GIB, "secondary_tiers": [FS, FS | {"root_dir": "/var/cache/./kv"}]}
    )
    assert "/var/cache/kv more than once" in problem


@pytest.mark.parametrize(
    ("given", "expected"), [(True, "on"), (False, "off"), ("auto", "auto"), ("on", "on"), ("off", "off")]
)
def test_o_direct_accepts_words_and_booleans(given, expected):
    assert read(secondary_tiers=[FS | {"o_direct": given}]).secondary_tiers[0].o_direct == expected


def test_root_dir_is_made_absolute(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")
    tiers = [FS | {"root_dir": "kv"}, FS | {"root_dir": "~/kv"}]
    roots = [tier.root_dir for tier in read(secondary_tiers=tiers).secondary_tiers]
    assert roots == [str(tmp_path / "kv"), "/home/someone/kv"]


def test_processes_use_different_ports():
    config = read(metrics_port="9400", metrics_host="0.0.0.0")
    ranks = (None, 0, 1)
    addresses = [config.metrics_address(rank, 2, replica) for replica in (0, 1) for rank in ranks]
    assert addresses == [f"0.0.0.0:{port}" for port in range(9400, 9406)]


def test_metrics_are_served_to_this_machine_only_unless_asked():
    assert read(metrics_port=9400).metrics_address(None) == "127.0.0.1:9400"


@pytest.mark.parametrize("off", [0, None, "0"])
def test_without_a_metrics_port_there_is_no_address(off):
    assert read(metrics_port=off).metrics_address(None) is None


def test_a_port_beyond_the_last_is_refused_by_name():
    with pytest.raises(ConfigError, match="metrics_port 65535 gives this process port 65536"):
        read(metrics_port=65535).metrics_address(0)


def test_tier_names_are_distinct():
    config = read(secondary_tiers=[FS | {"root_dir": f"/r{i}"} for i in range(3)])
    assert config.tier_names() == ("fs", "fs-2", "fs-3")


@pytest.mark.parametrize(
    "key", ["max_recompute_pending_tokens", "control_plane_interval_s", "store_mode", "namespace"]
)
def test_a_key_unlike_any_known_key_is_noted_as_possibly_of_a_later_vllm(key):
    _, notes = OffloadConfig.parse({"cpu_bytes_to_use": GIB, key: 1, "secondary_tiers": [FS | {key: 2}]})
    assert len(notes) == 2
    assert all(key in note and "ignored" in note for note in notes)
    assert notes[1].startswith("secondary_tiers[0]: ")


# Names of a bound in other tiers and forks, and names that people guess.
OTHER_BOUNDS = (
    *(
        "max_disk_gib",
        "max_size",
        "size_gb",
        "max_local_disk_size",
        "quota",
        "tenant_quota",
        "capacity_bytes",
    ),
    *("disk_limit", "max_space", "limit", "storage_budget", "high_watermark", "max_disk", "maxDiskGiB", "GB"),
)


@pytest.mark.parametrize("key", OTHER_BOUNDS)
def test_another_name_for_the_bound_of_a_tier_is_an_error_that_names_its_bound(key, monkeypatch):
    for tier, bound in (
        (FS, "max_bytes"),
        ({"type": "redis", "url": "redis://h"}, "maxmemory"),
        ({"type": "s3", "bucket": "bucket"}, "lifecycle rule"),
    ):
        (problem,) = problems({"cpu_bytes_to_use": GIB, "secondary_tiers": [tier | {key: 20}]})
        assert problem.startswith(f"secondary_tiers[0]: {key!r} is not known")
        assert bound in problem
    # The key stays an error even if vLLM reads a key of that name for its own tier.
    monkeypatch.setattr("kv_offload.config_compat.keys_read_by_vllm", lambda: frozenset({key}))
    assert "max_bytes" in problems({"cpu_bytes_to_use": GIB, "secondary_tiers": [FS | {key: 20}]})[0]


@pytest.mark.parametrize("key", ["max_disk_gib", "disk_size", "fs_quota", "storage_limit"])
def test_the_bound_of_a_disk_outside_of_a_tier_is_an_error_that_names_max_bytes(key):
    (problem,) = problems({"cpu_bytes_to_use": GIB, "secondary_tiers": [FS], key: 20})
    assert "secondary_tiers[...].max_bytes" in problem


@pytest.mark.parametrize("key", ["min_free_bytes", "reserved_bytes", "keep_free_gib", "free_space"])
def test_a_reserve_of_free_space_is_not_mistaken_for_a_bound(key):
    (problem,) = problems({"cpu_bytes_to_use": GIB, "secondary_tiers": [FS | {key: 20}]})
    assert "did you mean" not in problem
    assert "no setting here reserves free space; max_bytes limits the size of a tier" in problem


def test_a_misspelt_keep_key_is_still_corrected():
    assert (
        "did you mean 'keep_host_memory'" in problems({"cpu_bytes_to_use": GIB, "keep_host_memry": True})[0]
    )


@pytest.mark.parametrize("given", [0, -16, "many", "", 1e400, [1], {}])
@pytest.mark.parametrize("key", ["blocks_per_chunk", "block_size"])
def test_a_chunk_of_zero_blocks_is_refused(key, given):
    (problem,) = problems({"cpu_bytes_to_use": GIB, key: given})
    assert problem == f"{key} is {given!r}; it must be a number from 1"
    assert read(**{key: "4"}) == read(**{key: None}) == read(), "vLLM reads it in the same way"


def test_a_chunk_has_one_size():
    (problem,) = problems({"cpu_bytes_to_use": GIB, "blocks_per_chunk": 4, "block_size": 64})
    assert "give one of them" in problem


def test_a_key_that_the_installed_vllm_reads_is_accepted(monkeypatch):
    near = "load_policies"  # close to load_policy: an error if vLLM did not read it
    assert "did you mean 'load_policy'" in problems({"cpu_bytes_to_use": GIB, near: 1})[0]
    monkeypatch.setattr("kv_offload.config_compat.keys_read_by_vllm", lambda: frozenset({near}))
    _, (note,) = OffloadConfig.parse({"cpu_bytes_to_use": GIB, near: 1})
    assert "left to vLLM" in note


def test_keys_of_vllm_are_found_in_its_source_files(tmp_path):
    package = tmp_path / "v1" / "kv_offload"
    package.mkdir(parents=True)
    (package / "spec.py").write_text(
        'self.extra_config.get("first", 0)\nextra_config.get(\n    "second"\n)\nextra_config["third"]\n'
        'other.get("no")'
    )
    assert keys_read_by_vllm(str(tmp_path)) == {"first", "second", "third"}
    assert keys_read_by_vllm(str(tmp_path / "missing")) == frozenset()


def test_the_files_of_vllm_are_read_once_however_many_configurations_are_parsed(tmp_path, monkeypatch):
    package = tmp_path / "v1" / "kv_offload"
    package.mkdir(parents=True)
    (package / "spec.py").write_text('extra_config.get("first")')
    looked = []
    rglob = Path.rglob
    monkeypatch.setattr(Path, "rglob", lambda self, pattern: looked.append(self) or rglob(self, pattern))
    assert keys_read_by_vllm(str(tmp_path)) == {"first"}
    once = len(looked)
    assert once > 0
    assert keys_read_by_vllm(str(tmp_path)) == {"first"}
    assert len(looked) == once


# ---- MultiConnector


def connectors(*names):
    children = [{"kv_connector": name, "kv_connector_extra_config": {"spec_name": name}} for name in names]
    return {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": children}}


def test_a_reporting_connector_is_one_of_ours_in_a_multi_connector():
    assert multi_connector_problems(connectors("NixlConnector", "ReportingConnector")) == []


@pytest.mark.parametrize("other", ["OffloadingConnector", "ReportingConnector"])
def test_a_reporting_connector_with_another_offloading_connector_is_refused(other):
    (problem,) = multi_connector_problems(connectors(other, "ReportingConnector"))
    assert "2 OffloadingConnectors" in problem


# ---- configurations written for others


IN_TREE = {
    "spec_name": "TieringOffloadingSpec",
    "cpu_bytes_to_use": 10 * GIB,
    "block_size": 256,
    "eviction_policy": "arc",
    "offload_prompt_only": False,
    "self_describing_kv_events": True,
    "sync_load_budget_bytes": 1 << 20,
    "canonical_layout": False,
    "store_threshold": 0,
    "max_tracker_size": 64_000,
    "tier_poll_interval_s": 0.001,
    "backpressure": {"backpressure_cls": "EMABackpressureDetector"},
    "secondary_tiers": [
        {
            "type": "fs",
            "root_dir": "/mnt/kv",
            "n_read_threads": "16",
            "n_write_threads": 8,
            "enable_kv_events": True,
            "locality": "REMOTE",
            "backpressure": {},
        }
    ],
}


def test_a_config_of_the_in_tree_specs_keeps_its_meaning():
    config, notes = OffloadConfig.parse(IN_TREE)
    (tier,) = config.secondary_tiers
    assert config.cpu_bytes_to_use == 10 * GIB
    assert (tier.root_dir, tier.n_read_threads, tier.n_write_threads) == ("/mnt/kv", 16, 8)
    assert (tier.enable_kv_events, tier.locality) == (True, "REMOTE")
    assert config.eviction_policy == "prefix"
    named = ("max_tracker_size", "tier_poll_interval_s", "backpressure", "eviction_policy 'arc'")
    for key in (*named, "secondary_tiers[0].backpressure"):
        assert any(note.startswith(key) for note in notes), key
    assert not any("store_threshold" in note for note in notes), "no note: it is off in vLLM too"


def test_ignored_keys_are_listed_in_one_warning(caplog):
    with caplog.at_level(logging.WARNING, logger="vllm.kv_offload"):
        OffloadConfig.from_extra_config(IN_TREE)
    (record,) = caplog.records
    assert "max_tracker_size is ignored" in record.getMessage()
    assert "secondary_tiers[0].backpressure is ignored" in record.getMessage()


def test_without_ignored_keys_there_is_no_warning(caplog):
    with caplog.at_level(logging.DEBUG, logger="vllm.kv_offload"):
        read(secondary_tiers=[FS])
    assert not caplog.records


def test_parsing_does_not_change_the_given_table():
    given = json.loads(json.dumps(IN_TREE))
    OffloadConfig.parse(given)
    assert given == IN_TREE


def test_the_note_on_store_threshold_names_the_write_policy():
    _, notes = OffloadConfig.parse({"cpu_bytes_to_use": GIB, "store_threshold": "2"})
    assert '"write_policy": "reuse:2"' in notes[0]
    assert "store_threshold is 'x'" in problems({"cpu_bytes_to_use": GIB, "store_threshold": "x"})[0]


def test_a_foreign_eviction_policy_falls_back_only_with_a_module_path():
    foreign = {"cpu_bytes_to_use": GIB, "eviction_policy": "Mine"}
    config, notes = OffloadConfig.parse(foreign | {"cache_policy_module_path": "my.policy"})
    assert config.eviction_policy == "prefix"
    assert any("'Mine'" in note for note in notes)
    assert "eviction_policy: is 'Mine'; possible: lru" in problems(foreign)[0]


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_host_memory_and_each_tier_may_have_a_policy_of_their_own(policy):
    tiers = [{"type": "fs", "root_dir": "/a", "eviction_policy": policy}, {"type": "fs", "root_dir": "/b"}]
    config = read(eviction_policy=policy, secondary_tiers=tiers)
    assert config.eviction_policy == policy
    assert [tier.eviction_policy for tier in config.secondary_tiers] == [policy, "prefix"]


@pytest.mark.parametrize("given", ["reuse:0", "reuse:128", "reuse:", "reuse:2.0"])
def test_lookup_counts_are_bounded(given):
    assert read(secondary_tiers=[FS | {"write_policy": "reuse:127"}])
    (problem,) = problems({"cpu_bytes_to_use": GIB, "secondary_tiers": [FS | {"write_policy": given}]})
    assert "N = 1 to 127" in problem


def test_an_unknown_policy_of_a_tier_is_refused_naming_the_known_ones():
    tier = {"type": "fs", "root_dir": "/a", "eviction_policy": "fifo"}
    (problem,) = problems({"cpu_bytes_to_use": GIB, "secondary_tiers": [tier]})
    assert problem.startswith("secondary_tiers[0].eviction_policy: is 'fifo'; possible: lru, prefix")


@pytest.mark.parametrize(
    "extra",
    [
        {"shared_storage_path": "/mnt/files"},
        {"spec_name": "SharedStorageOffloadingSpec"},
        {"spec_module_path": "llmd_fs_backend.spec"},
    ],
)
def test_an_llmd_config_is_translated_to_ours(extra):
    (problem,) = problems(extra | {"block_size": 256, "threads_per_gpu": "64"})
    assert "llm-d" in problem
    ours = json.loads(problem[problem.index("{") :])
    config = OffloadConfig.from_extra_config(ours)
    assert ours["block_size"] == 256
    assert config.secondary_tiers[0].n_read_threads == 64
    assert config.secondary_tiers[0].root_dir == extra.get("shared_storage_path", "/var/cache/kv")


def test_a_value_that_is_not_a_table_is_refused():
    assert "is list, not a table" in problems([1])[0]  # type: ignore[arg-type]


def test_import_loads_neither_core_nor_numpy_nor_vllm():
    code = (
        "import sys, kv_offload, kv_offload.config, kv_offload.namespace, kv_offload.sizing\n"
        "assert isinstance(kv_offload.__version__, str)\n"
        "heavy = {'kv_offload._core', 'numpy', 'vllm', 'torch'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


# ---- what the machine can give


def plenty(_directory):
    return 1 << 50, "/dev/shm"


def checked(config, available=plenty, **options):
    return check_machine(config, headroom=available, **options)


def test_a_machine_with_room_has_no_problems(tmp_path):
    assert checked(read(secondary_tiers=[FS | {"root_dir": str(tmp_path / "a" / "b")}])) == []
    assert not (tmp_path / "a").exists(), "a query must not create files"


def test_each_host_of_an_engine_needs_its_share_of_the_memory():
    config = read(cpu_bytes_to_use="4GiB")
    assert checked(config, lambda _: (2 * GIB, "/dev/shm"), hosts=2) == []
    (problem,) = checked(config, lambda _: (GIB, "/dev/shm"), hosts=2)
    assert "asks for 2.0 GiB of host memory on each of 2 hosts, 1.0 GiB are available" in problem


def test_memory_kept_for_a_restart_counts_as_free(monkeypatch):
    from kv_offload import machine

    _core = pytest.importorskip("kv_offload._core", reason="the core is not built")

    monkeypatch.setattr(_core, "memory_headroom", lambda _: (GIB, "/dev/shm"))
    regions = [("kv_offload-kept-a", 2 * GIB, False), ("kv_offload-kept-b", 4 * GIB, True)]
    monkeypatch.setattr(_core, "region_files", lambda _: regions)
    assert machine.host_memory() == (3 * GIB, "/dev/shm")
    assert check_machine(read(cpu_bytes_to_use="3GiB")) == []
    assert len(check_machine(read(cpu_bytes_to_use="4GiB"))) == 1


def test_kept_memory_with_encrypted_records_is_a_caution(tmp_path):
    (tmp_path / "key").write_bytes(bytes(range(32)))
    encrypted = FS | {"root_dir": str(tmp_path / "root"), "encryption_key_file": str(tmp_path / "key")}
    assert not any("unencrypted" in text for text in cautions(read(secondary_tiers=[encrypted])))
    kept = cautions(read(secondary_tiers=[encrypted], keep_host_memory=True))
    assert any("keep_host_memory" in text and "unencrypted" in text for text in kept)


def test_kept_memory_without_a_readable_boot_id_is_a_caution(tmp_path, monkeypatch):
    assert cautions(read(keep_host_memory=True)) == []
    (tmp_path / "empty").touch()
    for name, problem in (("missing", "No such file or directory"), ("empty", "it is empty")):
        monkeypatch.setattr("kv_offload.machine.BOOT_ID", tmp_path / name)
        (caution,) = cautions(read(keep_host_memory=True))
        assert f"{name} cannot be read ({problem})" in caution
        assert "take over no chunks" in caution
        assert cautions(read()) == []


@pytest.mark.parametrize(
    ("limit", "remedy"),
    [("/dev/shm", "--shm-size"), ("cgroup memory limit", "container"), ("MemAvailable", "free memory")],
)
def test_too_little_memory_names_asked_available_and_setting(limit, remedy):
    (problem,) = checked(read(cpu_bytes_to_use="2GiB"), lambda _: (GIB // 2, limit))
    for part in ("cpu_bytes_to_use", "2.0 GiB", "512.0 MiB", limit, remedy):
        assert part in problem


def test_unwritable_root_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    (problem,) = checked(read(secondary_tiers=[FS | {"root_dir": str(tmp_path)}]))
    assert f"root_dir {tmp_path}" in problem
    assert "may not write" in problem


@pytest.mark.parametrize("policy", ["write_through", "read_only"])
def test_a_root_on_a_read_only_mount_is_refused_with_its_cause(tmp_path, monkeypatch, policy):
    found = os.statvfs(tmp_path)
    fields = ("f_bavail", "f_frsize")
    mounted = SimpleNamespace(
        f_flag=found.f_flag | os.ST_RDONLY, **{name: getattr(found, name) for name in fields}
    )
    monkeypatch.setattr(os, "statvfs", lambda _: mounted)
    monkeypatch.setattr(os, "access", lambda *_: False)  # as the kernel answers there, also to root
    tier = FS | {"root_dir": str(tmp_path), "write_policy": policy}
    (problem,) = checked(read(secondary_tiers=[tier]))
    assert f"root_dir {tmp_path}" in problem
    assert "is mounted read-only" in problem
    assert "chmod" not in problem


def test_root_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    (problem,) = checked(read(secondary_tiers=[FS | {"root_dir": str(tmp_path / "file" / "kv")}]))
    assert "is not a directory" in problem


def test_a_symbolic_link_as_root_is_refused_with_its_target(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    (problem,) = checked(read(secondary_tiers=[FS | {"root_dir": str(tmp_path / "link")}]))
    assert problem.endswith(f"is a symbolic link; give the directory it points to: {tmp_path}/there")


def test_a_root_that_others_may_write_is_refused(tmp_path):
    tmp_path.chmod(0o1777)
    (problem,) = checked(read(secondary_tiers=[FS | {"root_dir": str(tmp_path)}]))
    assert "can be written by other users" in problem
    assert checked(read(secondary_tiers=[FS | {"root_dir": str(tmp_path / "kv")}])) == []


def test_root_of_another_user_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    (problem,) = checked(read(secondary_tiers=[FS | {"root_dir": str(tmp_path)}]))
    assert f"belongs to user {tmp_path.stat().st_uid}" in problem


def disk(monkeypatch, free):
    monkeypatch.setattr("kv_offload.tiers.fs.config.free_bytes", lambda _root: free)


def test_root_without_space_is_refused_but_a_full_root_of_records_is_not(tmp_path, monkeypatch):
    disk(monkeypatch, 4096)
    config = read(secondary_tiers=[FS | {"root_dir": str(tmp_path)}])
    (problem,) = checked(config, record_bytes=1 << 20)
    assert "4.0 KiB free on its file system, one record takes 1.0 MiB" in problem
    (tmp_path / "record").write_bytes(bytes(2 << 20))
    assert checked(config, record_bytes=1 << 20) == []


def test_a_bound_below_one_record_is_refused(tmp_path):
    config = read(secondary_tiers=[FS | {"root_dir": str(tmp_path), "max_bytes": "1MiB"}])
    (problem,) = checked(config, record_bytes=2 << 20)
    assert "max_bytes is 1.0 MiB, one record takes 2.0 MiB" in problem


def test_a_tier_without_bound_gets_half_of_free_and_held(tmp_path, monkeypatch):
    disk(monkeypatch, 1000)
    records = tmp_path / "ns" / "g1" / "ab"
    records.mkdir(parents=True)
    (records / "abcd.500.rec").write_bytes(b"x" * 100_000)
    held = held_bytes(str(tmp_path))
    assert held == used_bytes(tmp_path)
    assert tier_bounds(read(secondary_tiers=[FS | {"root_dir": str(tmp_path)}])) == ((1000 + held) // 2,)


def test_a_missing_directory_uses_no_space(tmp_path):
    assert held_bytes(str(tmp_path / "none")) == 0


def test_unbounded_tiers_of_one_disk_share_it(tmp_path, monkeypatch):
    disk(monkeypatch, 1000)
    roots = [FS | {"root_dir": str(tmp_path / name)} for name in "abc"]
    roots[2] |= {"max_bytes": "7B"}
    assert tier_bounds(read(secondary_tiers=roots)) == (250, 250, 7)


def test_a_bound_above_the_disk_is_a_caution_not_a_problem(tmp_path, monkeypatch):
    disk(monkeypatch, GIB)
    config = read(secondary_tiers=[FS | {"root_dir": str(tmp_path), "max_bytes": "4GiB"}])
    assert checked(config) == []
    (caution,) = cautions(config)
    assert "max_bytes is 4.0 GiB, its file system can hold 1.0 GiB" in caution


def test_bounds_above_their_disk_together_are_a_caution(tmp_path, monkeypatch):
    disk(monkeypatch, GIB)

    def said(*tiers):
        roots = [
            FS | {"root_dir": str(tmp_path / name)} | tier for name, tier in zip("abc", tiers, strict=False)
        ]
        return [text for text in cautions(read(secondary_tiers=roots)) if "together" in text]

    (caution,) = said({"max_bytes": "700MiB"}, {"max_bytes": "400MiB"})
    assert f"root_dir {tmp_path / 'a'}, {tmp_path / 'b'}: max_bytes is 1.1 GiB together" in caution
    assert "their file system can hold 1.0 GiB" in caution
    assert said({"max_bytes": "700MiB"}, {}), "the default is half of the free space"
    assert said({"max_bytes": "600MiB"}, {"max_bytes": "424MiB"}) == said({}, {}) == []
    assert said({"max_bytes": "700MiB"}, {"max_bytes": "400MiB", "write_policy": "read_only"}) == []
    assert said({"max_bytes": "4GiB"}, {"max_bytes": "400MiB"}) == [], "the first one has its own caution"
    assert said({"max_bytes": "700MiB"}, {"max_bytes": "330MiB"})
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "abcd.500.rec").write_bytes(b"x" * (8 << 20))
    assert said({"max_bytes": "700MiB"}, {"max_bytes": "330MiB"}) == [], "what they hold counts as space"


def test_a_disk_smaller_than_host_memory_is_a_caution_with_the_consequence(tmp_path, monkeypatch):
    disk(monkeypatch, 100 * GIB)

    def said(**tier):
        tiers = [FS | {"root_dir": str(tmp_path)} | tier]
        return cautions(read(cpu_bytes_to_use="4GiB", secondary_tiers=tiers))

    (caution,) = said(max_bytes="3GiB")
    assert caution.startswith(f"disk {tmp_path} holds 3.0 GiB, host memory 4.0 GiB: ")
    assert "only its chunks survive a restart" in caution
    assert said(max_bytes="4GiB") == said() == said(max_bytes="3GiB", write_policy="read_only") == []


@pytest.mark.parametrize(
    ("given", "allowed"),
    [
        ("ignore", set()),
        ([], set()),
        (["resume_in", "release"], {"resume_in", "release"}),
        (["priority", "pin"], {"priority", "pin"}),
    ],
)
def test_request_hints_may_list_what_requests_may_send(given, allowed):
    config = OffloadConfig.from_extra_config({"cpu_bytes_to_use": GIB, "request_hints": given})
    assert config.allowed_hints == allowed


def test_all_hints_are_allowed_by_default():
    config = OffloadConfig.from_extra_config({"cpu_bytes_to_use": GIB})
    assert {"load_policy", "remote_wait_ms", "resume_at", "pin"} <= config.allowed_hints


@pytest.mark.parametrize(
    ("given", "quoted"),
    [
        ("alow", "'alow';"),
        ("pin", "'pin' without a list;"),
        (["resume"], "'resume'"),
        ([3], "3"),
        (True, "True"),
    ],
)
def test_an_unknown_hint_is_refused_with_the_possible_ones(given, quoted):
    (problem,) = problems({"cpu_bytes_to_use": GIB, "request_hints": given})
    assert problem.startswith(f"request_hints: is {quoted}")
    assert "possible: allow, ignore, or a list of load_policy, " in problem


def test_pins_are_an_eighth_of_host_memory_by_default_and_half_at_most():
    def pinned(**more):
        return OffloadConfig.from_extra_config({"cpu_bytes_to_use": 8 * GIB, **more}).pinned_bytes

    assert pinned() == GIB
    assert pinned(max_pinned_bytes=0) == 0
    assert pinned(max_pinned_bytes="2GiB") == 2 * GIB
    assert pinned(max_pinned_bytes="7GiB") == 4 * GIB


def test_host_memory_may_be_shared_and_kept() -> None:
    config = read(share_host_memory=True, keep_host_memory=True)
    assert config.share_host_memory
    assert config.keep_host_memory
