# SPDX-License-Identifier: Apache-2.0
"""No decision of the core compares the wall clocks of two hosts, which may differ by minutes.

Deadlines and durations use steady clocks, and messages between hosts contain only durations. This test lists
the few reads of the wall clock. A new one fails it: state here why clocks that differ do no harm.
"""

import re
from pathlib import Path

CSRC = Path(__file__).resolve().parents[2] / "csrc"
READS = re.compile(
    r"system_clock|utc_clock|tai_clock|file_clock|CLOCK_REALTIME|CLOCK_TAI|gettimeofday|timespec_get"
    r"|clock_gettime\(\s*0|(?<![\w.>])(?:std::|::)?time\(|UTIME_NOW"
)

ALLOWED = {
    # The times of last use of records. Own times are compared with those of the file system, and follow the
    # file system's clock if the two differ by more than 5 s.
    "backends/fs/recency.cc": 1,
    # Whether the empty directory of a probe is older than an hour, by the time that its file system states. A
    # clock that is hours ahead removes the directory of a probe that has just started, which then fails.
    "backends/fs/reclaim.cc": 1,
    # Shown by `kv-offload ls`: now minus the idle time that the server reports.
    "backends/redis/records.cc": 1,
    # The signature of a request. The store compares it with its own clock only: 15 minutes are allowed.
    "backends/s3/client.cc": 1,
    # The time in a record's header, which commands show.
    "record/record.cc": 1,
}


def code_of(path: Path) -> str:
    return re.sub(r"//.*", "", path.read_text())


def test_the_wall_clock_is_read_only_where_clocks_of_hosts_may_differ() -> None:
    found = {
        str(path.relative_to(CSRC)): len(READS.findall(code_of(path)))
        for path in sorted(CSRC.rglob("*"))
        if path.suffix in (".cc", ".h", ".cu") and READS.search(code_of(path))
    }
    assert found == ALLOWED


def test_messages_between_hosts_contain_no_time() -> None:
    text = code_of(CSRC / "hosts" / "tier_frames.cc") + code_of(CSRC / "hosts" / "frame.cc")
    assert "unix" not in text
    assert "returns_at" not in text, "a time on the scheduler's clock; hints apply to host memory only"
    assert "deadline" not in text, "a deadline is sent as the time that is left (HostOp::nanos_left)"
    assert "used_unix_nanos" not in code_of(CSRC / "hosts" / "remote_tier.cc")
