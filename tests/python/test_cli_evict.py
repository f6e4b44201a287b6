# SPDX-License-Identifier: Apache-2.0
"""kv-offload evict: order, marks, statuses, and the watch mode as a process of its own."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from live_root import records_in, used_bytes
from typer.testing import CliRunner
from written_root import CHUNK, FACTS, KEYS, write_root

from kv_offload.cli import app
from kv_offload.cli.evict_command import Bound, Watch, parse_duration

pytest.importorskip("kv_offload._core", reason="the core is not built")

OTHER = replace(FACTS, kv_dtype="fp8")
RECORD = CHUNK + 4096
DAY = 86_400.0


def records(root, facts=FACTS):
    return records_in(root / facts.namespace_id().hex())


def last_used(paths, seconds_ago):
    for number, path in enumerate(paths):
        os.utime(path, (time.time(), time.time() - seconds_ago + number))
        mark = path.parents[2] / "open"
        os.utime(mark, (time.time(), time.time() - seconds_ago))


def evict(*arguments, status=0):
    result = CliRunner().invoke(app, ["evict", *(str(argument) for argument in arguments)])
    assert result.exit_code == status, f"{result.output}\n{result.exception!r}"
    return result


@pytest.fixture
def root(tmp_path):
    """Creates one namespace used a day ago, whose records are one second apart."""
    root = write_root(tmp_path / "root")
    last_used(records(root), DAY)
    return root


def test_below_the_high_mark_no_record_is_evicted(root):
    bound = int(used_bytes(root) / 0.95) + 1
    report = json.loads(evict(root, "--max-bytes", f"{bound}B", "--json").stdout)
    assert (report["bytes_freed"], report["below_limit"]) == (0, True)
    assert len(records(root)) == len(KEYS)


def test_above_the_high_mark_the_oldest_are_evicted_down_to_the_low_mark(root):
    kept = records(root)[2:]
    size = used_bytes(root)
    low = 100 * (size - 2 * RECORD + 1000) / size
    report = json.loads(
        evict(
            root, "--max-bytes", f"{size}B", "--high", 99, "--low", low, "--dead-after", "7d", "--json"
        ).stdout
    )
    assert (report["records"], report["bytes_freed"], report["below_limit"]) == (2, 2 * RECORD, True)
    assert report["bytes_after"] == used_bytes(root)
    assert records(root) == kept


def test_a_dry_run_removes_nothing(root):
    text = " ".join(
        evict(root, "--max-bytes", f"{3 * RECORD}B", "--dead-after", "7d", "--dry-run").output.split()
    )
    assert "would be removed" in text
    assert len(records(root)) == len(KEYS)


def test_records_that_take_fewer_blocks_than_their_size_are_evicted(root):
    for record in records(root):
        record.write_bytes(b"")
        os.truncate(record, 1 << 30)  # sparse
    bound = f"{used_bytes(root) // 2}B"
    evict(root, "--max-bytes", bound, "--low", 1, "--dry-run")
    report = json.loads(evict(root, "--max-bytes", bound, "--low", 1, "--json").stdout)
    assert records(root) == []
    assert report["bytes_freed"] > report["bytes_before"]
    assert report["bytes_after"] == used_bytes(root)


def test_a_dead_namespace_is_evicted_before_older_records_of_a_live_one(root):
    write_root(root, OTHER)
    last_used(records(root, OTHER), 2 * DAY)
    last_used(records(root, OTHER)[-1:], 60)  # used a minute ago: alive
    bound = used_bytes(root) - RECORD
    report = json.loads(evict(root, "--max-bytes", f"{bound}B", "--high", 100, "--low", 100, "--json").stdout)
    assert report["dead_namespaces"] == [FACTS.namespace_id().hex()]
    assert len(records(root)) < len(KEYS)
    assert len(records(root, OTHER)) == len(KEYS)


def test_files_of_others_are_counted_but_not_removed(root):
    (root / "foreign").write_bytes(bytes(1 << 20))
    report = evict(root, "--max-bytes", "512KiB", "--dead-after", "0", status=1)
    assert "ABOVE THE LIMIT" in report.output
    assert (root / "foreign").exists()
    assert records(root) == []


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--max-bytes", "much"], "is not a size"),
        (["--max-bytes", "1GiB", "--high", 50, "--low", 60], "--low 60 is above --high 50"),
        (["--max-bytes", "1GiB", "--dead-after", "soon"], "is not a duration"),
        (["--max-bytes", "1GiB", "--watch", "--dry-run"], "cannot be used together"),
    ],
)
def test_wrong_usage_exits_with_2(root, arguments, part):
    assert part in evict(root, *arguments, status=2).stderr


def test_a_directory_of_others_is_not_changed(tmp_path):
    (tmp_path / "kept").write_text("kept")
    assert "is not a root" in evict(tmp_path, "--max-bytes", "1B", status=2).stderr
    assert (tmp_path / "kept").exists()


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("30min", 1800), ("12h", 43_200), ("0.5d", 43_200)]
)
def test_durations_are_parsed_to_seconds(text, seconds):
    assert parse_duration(text) == seconds


class Watching:
    """``kv-offload evict --watch --json`` as a process; ``line()`` returns its next report."""

    def __init__(self, root, *arguments):
        command = "from kv_offload.cli import main; main()"
        options = ["evict", str(root), "--watch", "--json", "--interval", "0.1", *arguments]
        self.process = subprocess.Popen(
            [sys.executable, "-c", command, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )

    def line(self):
        return json.loads(self.process.stdout.readline())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()


def test_watching_waits_for_the_root_evicts_and_exits_with_0_on_sigterm(tmp_path):
    root = tmp_path / "root"
    bound = 4 * RECORD + (1 << 18)
    arguments = ("--max-bytes", f"{bound}B", "--high", "100", "--low", "100", "--dead-after", "7d")
    with Watching(root, *arguments) as watching:
        assert "waiting" in watching.process.stderr.readline()
        root.mkdir(mode=0o700)
        (root / "foreign").write_bytes(bytes(1 << 18))
        write_root(root)
        report = watching.line()
        assert report["below_limit"]
        assert report["bytes_after"] <= bound
        assert 0 < len(records(root)) < len(KEYS)
        watching.process.send_signal(signal.SIGTERM)
        assert watching.process.wait(240) == 0


def test_a_watched_root_below_its_mark_is_checked_again_at_once(root):
    used = used_bytes(root)
    shown = []
    watch = Watch(str(root), Bound(used, used, used, 7 * DAY), 0.1, shown.append)
    watch.check()
    assert shown == []
    write_root(root, OTHER)
    watch.check()
    (report,) = shown
    assert report["bytes_after"] <= used < report["bytes_before"]


def test_watching_continues_when_the_root_is_temporarily_unusable(root, monkeypatch, capsys):
    from kv_offload._core import ResourceError

    watch = Watch(str(root), Bound(1, 1, 1, DAY), 0.0, print)
    answers = iter([ResourceError("cannot open its account"), OSError("stale")])

    def check():
        error = next(answers, None)
        if error is not None:
            raise error
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(watch, "check", check)
    watch.run()
    assert capsys.readouterr().err.splitlines() == [
        "kv-offload: cannot open its account",
        "kv-offload: stale",
    ]


def test_watching_next_to_a_writer_keeps_its_records_servable(tmp_path):
    """The root is written and evicted concurrently; the recorded usage is right in the end."""
    root = write_root(tmp_path / "root")
    arguments = ("--max-bytes", f"{used_bytes(root)}B", "--high", "90", "--low", "50", "--dead-after", "7d")
    with Watching(root, *arguments) as watching:
        first = watching.line()
        assert first["bytes_after"] <= used_bytes(root) + RECORD
        for _ in range(3):
            write_root(root)  # opens, recounts, stores missing records, closes
        watching.process.send_signal(signal.SIGINT)
        assert watching.process.wait(240) == 0
    result = CliRunner().invoke(app, ["verify", str(root), "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["damaged"] == []
