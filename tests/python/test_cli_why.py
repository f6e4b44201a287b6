# SPDX-License-Identifier: Apache-2.0
"""kv-offload why, and doctor URL: the meaning of metrics and log lines, for each cause."""

import json
import logging
import re

import pytest
from adapter import use_specs
from test_cli_top import FIRST, serve  # noqa: F401  (a fixture)
from typer.testing import CliRunner

from kv_offload import _core
from kv_offload.cli import app
from kv_offload.config import ConfigError, OffloadConfig
from kv_offload.diagnosis import REASONS, from_log, from_metrics
from kv_offload.exposition import Page
from kv_offload.hints import parse
from kv_offload.namespace import random_seed_warning
from kv_offload.sizing import Geometry, startup_summary

use_specs()

from kv_offload.specs.compat import refusal  # noqa: E402
from kv_offload.specs.report import report_text  # noqa: E402
from kv_offload.specs.request import HintReader  # noqa: E402
from kv_offload.specs.watch import HitWatch, Surroundings  # noqa: E402

BOOTED = startup_summary(
    OffloadConfig(cpu_bytes_to_use=1 << 30), [], Geometry.of([16], [[4096]]),
    copier="host", namespace="3fa2", version="0.1.0",
)  # fmt: skip


def run(*arguments, status=0, given=""):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], input=given)
    assert result.exit_code == status, f"{result.output}\n{result.exception!r}"
    return result


def page(*changes):
    """Returns a metrics page as the core writes it, after each change (metric, labels, value)."""
    metrics = _core.Metrics()
    known = {definition.name: definition for definition in _core.metric_definitions()}
    for tier in ("cpu", "fs"):
        metrics.set("kv_offload_tier_capacity_bytes", [tier], 1 << 30)
        metrics.set("kv_offload_tier_capacity_tokens", [tier], 1000)
    for name, labels, value in changes:
        change = metrics.set if known[f"kv_offload_{name}"].type == "gauge" else metrics.add
        change(f"kv_offload_{name}", labels, value)
    return metrics.text()


def causes(text):
    return [finding.cause for finding in from_metrics(Page(text)).findings]


STORED = ("stored_tokens_total", [], 1e6)
HIT = ("hit_tokens_total", ["cpu"], 5)


def test_every_reason_of_the_core_is_explained():
    definition = {d.name: d for d in _core.metric_definitions()}["kv_offload_miss_tokens_total"]
    named = re.search(r"first miss: (.*)\.", definition.documentation).group(1).split(", ")
    assert set(named) == set(REASONS)


@pytest.mark.parametrize("reason", REASONS)
def test_a_reason_is_shown_with_its_share_meaning_and_advice(reason):
    text = page(STORED, ("miss_tokens_total", [reason], 900), ("miss_tokens_total", ["new_in_this"], 100))
    first, second = from_metrics(Page(text)).findings
    assert (first.cause, first.tokens) == (reason, 900)
    assert first.text.startswith("900 tokens (90.0% of those missed): ")
    assert REASONS[reason][0] in first.text
    assert first.advice == REASONS[reason][1]
    assert second.cause == "new_in_this", "unknown reasons must be listed too"


def test_the_largest_cause_is_first_and_tiny_ones_are_omitted():
    missed = {"not_stored": 50_000, "evicted": 70_000, "io_error": 100}
    text = page(STORED, *(("miss_tokens_total", [reason], tokens) for reason, tokens in missed.items()))
    assert causes(text) == ["evicted", "not_stored"]


def test_capacity_and_estimates_are_shown_where_they_are_the_cause():
    (evicted,) = from_metrics(Page(page(STORED, ("miss_tokens_total", ["evicted"], 5)))).findings
    assert "hold 2,000 tokens" in evicted.text
    (computed,) = from_metrics(
        Page(
            page(
                STORED,
                ("miss_tokens_total", ["recompute_cheaper"], 5),
                ("decisions_total", ["recompute"], 4),
                ("estimated_seconds_total", ["recompute", "load"], 40),
                ("estimated_seconds_total", ["recompute", "compute"], 2),
            )
        )
    ).findings
    assert "on average 10.00 s against 0.50 s" in computed.text


@pytest.mark.parametrize(
    ("changes", "expected", "part"),
    [
        ([], ["nothing_stored", "nothing_looked_up"], "longer than a chunk"),
        ([STORED], ["nothing_looked_up"], "there was no request yet"),
        ([STORED, HIT], [], ""),
        ([STORED, HIT, ("breaker_trips_total", ["fs"], 1)], ["tier_off"], "out of service once"),
        (
            [STORED, HIT, ("failures_total", ["fs", "write", "no_space"], 3)],
            ["failures"],
            "free space",
        ),
        ([STORED, HIT, ("oldest_op_seconds", ["fs", "read"], 11)], ["stuck"], "11 s"),
        (
            [
                STORED,
                HIT,
                ("write_bytes_total", ["fs"], 60),
                ("dropped_bytes_total", ["fs", "pressure"], 40),
            ],
            ["not_written"],
            "40% of the bytes",
        ),
    ],
)  # fmt: skip
def test_other_causes_are_found_in_the_metrics(changes, expected, part):
    found = from_metrics(Page(page(*changes))).findings
    assert [finding.cause for finding in found] == expected
    assert part in " ".join(f"{finding.text} {finding.advice}" for finding in found)


def tier_findings(text, cause):
    (found,) = (finding for finding in from_metrics(Page(text)).findings if finding.cause == cause)
    return found


def test_hosts_that_are_lost_or_fail_are_named():
    healthy = [("host_connected", [host], 1) for host in "012"]
    healthy += [("host_tier_capacity_bytes", [host, "fs"], 1) for host in "012"]
    assert "host" not in " ".join(causes(page(STORED, HIT, *healthy)))
    text = page(
        STORED,
        HIT,
        *healthy,
        ("host_connected", ["2"], 0),
        ("host_failures_total", ["1", "fs", "read", "io"], 3),
        ("host_breaker_trips_total", ["1", "fs"], 2),
    )
    lost, failed = (found.text for found in from_metrics(Page(text)).findings if "host" in found.cause)
    assert lost.startswith("host 2 was not connected")
    assert failed == (
        "host 1: 3 operations on its part of tier fs failed and the circuit breaker of its part of tier fs "
        "tripped 2 times"
    )


def test_a_tier_whose_hosts_have_different_epochs_is_named_with_its_hosts_and_remedy(serve):  # noqa: F811
    usable = [
        ("host_tier_usable", [host, tier, op], 1)
        for host in "012"
        for tier in ("s3", "redis")
        for op in ("read", "write", "epoch")
    ]
    assert causes(page(STORED, HIT, *usable)) == []
    down = [("host_tier_usable", [host, "redis", op], 0) for host in "012" for op in ("read", "write")]
    assert "different_epochs" not in causes(page(STORED, HIT, *usable, *down)), "no store responds"
    text = page(
        STORED, HIT, *usable, *down, *(("host_tier_usable", [host, "redis", "epoch"], 0) for host in "02")
    )
    found = tier_findings(text, "different_epochs")
    assert found.text.startswith(
        "tier redis is out of service on all hosts: the stores of hosts 0, 2 respond, but have different "
        "epochs"
    )
    assert "start the stores that do not respond" in found.advice
    address = serve(FIRST + text)
    shown = run("why", address).stdout
    assert "the stores of hosts 0, 2 respond" in " ".join(shown.split())
    checks = json.loads(run("doctor", address, "--json").stdout)["checks"]
    (check,) = [each for each in checks if each["name"] == "different_epochs"]
    assert check["state"] == "note"
    assert "hosts 0, 2" in check["text"]
    assert "a new, empty epoch" in check["text"]


def test_chunks_dropped_by_host_memory_are_a_share_of_stored_chunks():
    dropped = ("dropped_bytes_total", ["cpu", "pressure"], 4096)
    assert causes(page(STORED, HIT, ("stored_bytes_total", [], 1e9), dropped)) == []
    found = tier_findings(
        page(STORED, HIT, ("stored_bytes_total", [], 3 * 4096), dropped), "not_stored_in_memory"
    )
    assert found.text == "25% of the bytes that were to be stored in host memory were dropped"
    assert "cpu_bytes_to_use" in found.advice
    assert "faster device" not in found.advice
    # Chunks that host memory stored are not a part of those dropped on a slower tier.
    to_disk = ("dropped_bytes_total", ["fs", "pressure"], 4096)
    assert "not_written" in causes(page(STORED, HIT, ("stored_bytes_total", [], 1e9), to_disk))


@pytest.mark.parametrize(
    ("rebuilds", "lost", "said"),
    [
        (1, 0, "it removed its directory or files that it needs, which the server recreated (once)"),
        (2, 3 << 20, "which the server recreated (2 times) and removed 3.0 MiB of its records"),
        (0, 3 << 20, "it removed 3.0 MiB of its records"),
    ],
)
def test_removals_by_other_programs_are_reported(rebuilds, lost, said, serve):  # noqa: F811
    more = f'kv_offload_tier_rebuilds_total{{tier="fs"}} {rebuilds}\n'
    more += f'kv_offload_tier_lost_bytes_total{{tier="fs"}} {lost}\n'
    found = tier_findings(page(STORED, HIT) + more, "removed_by_others")
    assert found.text.startswith("another program changed tier fs: ")
    assert found.text.endswith(said)
    address = serve(FIRST + more)
    checks = json.loads(run("doctor", address, "--json").stdout)["checks"]
    assert [check["state"] for check in checks if check["name"] == "removed_by_others"] == ["note"]
    assert "Another program changed tier fs" in run("why", address).stdout


# ---- logs: the code under test creates each line


def warned(caplog, **around):
    """Logs the one warning of a server that stores and never hits."""
    metrics = _core.Metrics()
    metrics.add("kv_offload_miss_tokens_total", ["not_stored"], 2e6)
    metrics.set("kv_offload_tier_chunks", ["cpu"], 1)
    with caplog.at_level(logging.WARNING):
        HitWatch(metrics, ("cpu",), None, Surroundings(**around)).poll(0.0)
    return caplog.messages[-1]


def of_log(*lines):
    prefix = "(EngineCore pid=7) WARNING 11-22 23:05:11 [watch.py:80] "
    return from_log([f"{prefix}{line}\n" for line in (BOOTED, *lines)])


def test_the_warning_that_nothing_hits_is_explained(caplog):
    (found,) = of_log(warned(caplog)).findings
    assert (found.cause, found.tokens) == ("not_stored", 2_000_000)
    assert "2,000,000 of 2,000,000 tokens" in found.text
    assert "the requested prompts were never stored" in found.advice


def test_the_warning_about_a_random_hash_seed_is_explained():
    (found,) = of_log(random_seed_warning("xxhash")).findings
    assert found.cause == "random_seed"
    assert found.text.startswith("RECORDS WILL NEVER BE FOUND AGAIN"), "the prefix of the log must be removed"
    assert "sha256" in found.advice


def test_the_warning_about_an_ignored_hint_is_explained(caplog):
    with caplog.at_level(logging.WARNING):
        HintReader().read({"kv_offload_load_policy": "sometimes"})
    (found,) = of_log(caplog.messages[-1]).findings
    assert found.cause == "ignored_hint"
    assert "kv_offload_load_policy is 'sometimes'" in found.text


def test_hints_about_sessions_that_are_rejected(caplog):
    (outcome,) = parse({"version": 1, "actions": [{"type": "resume_in"}]}).rejected
    with caplog.at_level(logging.WARNING):
        HintReader().log_rejected(outcome)
    (found,) = of_log(caplog.messages[-1]).findings
    assert found.cause == "ignored_hint"
    assert "a hint of type resume_in is rejected: seconds is required" in found.text


def test_requests_of_a_debug_log_are_summed():
    report = {"hit_tokens": {"fs": 100}, "miss_tokens": {"evicted": 300}, "choice": "", "waited_seconds": 0}
    found = of_log(*(f"Request {n}: {report_text(report)}" for n in range(3)))
    assert (found.hit_tokens, found.miss_tokens) == (300, 900)
    assert found.verdict == "300 of 1,200 tokens that were looked up were loaded (25.0%)."
    assert [finding.cause for finding in found.findings] == ["evicted"]


def test_each_problem_of_a_refused_configuration_is_explained():
    with pytest.raises(ConfigError) as refused:
        OffloadConfig.from_extra_config({"cpu_bytes_to_use": 32, "load_policies": 1})
    found = from_log([f"{line}\n" for line in f"ConfigError: {refused.value}".splitlines()]).findings
    assert [finding.cause for finding in found] == ["refused", "refused"]
    assert "has no unit" in found[0].text
    assert "kv-offload doctor" in found[0].advice


def test_the_refusal_of_an_unsupported_vllm_is_explained():
    (found,) = of_log(refusal("0.12.0", "it was not tested")).findings
    assert found.cause == "vllm_not_supported"


def test_disabled_prefix_caching_is_found_in_the_log():
    (found,) = of_log("Initializing a V1 LLM engine with config: enable_prefix_caching=False, ...").findings
    assert found.cause == "prefix_caching_off"


def test_a_log_without_plugin_or_startup_summary_is_reported():
    (found,) = from_log(["INFO vLLM API server version 0.32.0\n"]).findings
    assert found.cause == "not_in_use"
    (found,) = from_log(["WARNING kv_offload: something\n"]).findings
    assert found.cause == "no_boot_line"
    assert of_log().findings == (), "negative control: a normal start has no findings"


# ---- the commands


def test_why_reads_a_log_a_saved_page_and_standard_input(tmp_path):
    log, saved = tmp_path / "server.log", tmp_path / "metrics.txt"
    log.write_text(f"{BOOTED}\n{random_seed_warning('xxhash')}\n")
    saved.write_text(page(STORED, ("miss_tokens_total", ["disabled"], 10)))
    text = run("why", log, status=1).stdout
    assert "1. random_seed" in text
    assert "Set PYTHONHASHSEED to the same value" in text
    assert "load_policy is never" in run("why", saved, status=1).stdout.lower()
    answer = json.loads(run("why", "-", "--json", status=1, given=log.read_text()).stdout)
    assert [finding["cause"] for finding in answer["findings"]] == ["random_seed"]


def test_why_explains_the_misses_of_a_running_server(serve):  # noqa: F811
    text = run("why", serve(FIRST)).stdout
    assert "5,000 of 6,005 tokens that were looked up were loaded (83.3%)." in text
    assert "1. not_stored" in text
    assert "Operations of tier fs failed: 2 corrupt." in text


def test_why_reports_an_unreachable_server(tmp_path):
    assert "no such file" in run("why", tmp_path / "none.log", status=2).stderr
    assert "http://127.0.0.1:1/metrics cannot be reached" in run("why", "127.0.0.1:1", status=1).stderr


def test_doctor_checks_a_running_server(serve):  # noqa: F811
    address = serve(FIRST)
    checks = json.loads(run("doctor", address, "--json").stdout)["checks"]
    told = {check["name"]: check for check in checks}
    assert "version 0.1.0, namespace 3fa2c0ffee12, copier host" in told["server"]["text"]
    assert (told["tier fs"]["bytes"], told["tier fs"]["capacity_bytes"]) == (1 << 30, 4 << 30)
    assert (told["loaded"]["state"], told["loaded"]["hit_tokens"]) == ("ok", 5000)
    assert told["failures"]["state"] == "note"
    assert "memory" not in told, "doctor must query the server, not this machine"
    assert "tier fs" in run("doctor", address).stdout


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ("LBHNC", None),
        ("LBHNC, canonical", ("ok", "canonical: other tensor-parallel sizes share the records")),
        (
            "LBHNC, kept apart: 2 ranks hold",
            ("note", "not shared with other tensor-parallel sizes: 2 ranks hold"),
        ),
    ],
)
def test_doctor_shows_whether_other_tensor_parallel_sizes_share_the_records(layout, said, serve):  # noqa: F811
    address = serve(FIRST.replace('layout="LBHNC"', f'layout="{layout}"'))
    checks = json.loads(run("doctor", address, "--json").stdout)["checks"]
    told = [(check["state"], check["text"]) for check in checks if check["name"] == "layout"]
    assert len(told) == (0 if said is None else 1)
    for (state, text), expected in zip(told, [said], strict=False):
        assert state == expected[0]
        assert text.endswith(expected[1])


def test_doctor_checks_either_a_server_or_this_machine():
    assert "give one of them" in run("doctor", "127.0.0.1:1", "--root", "/kv", status=2).stderr
    assert "cannot be reached" in run("doctor", "127.0.0.1:1", status=1).stderr
