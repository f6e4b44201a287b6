# SPDX-License-Identifier: Apache-2.0
"""Agent sessions: both trace formats, the closed loop, simulated hints, and ``kv-offload replay`` of them."""

import json
import math

import pytest
from typer.testing import CliRunner

from kv_offload.cli import app
from kv_offload.replay import chart
from kv_offload.replay.formats import common_length, holds_sessions, read_sessions
from kv_offload.traces import Setting, Speeds, replay

core = pytest.importorskip("kv_offload._core", reason="the core is not built")

# Two sessions with the same text of 2 blocks. [t, stream, in, out, blocks, common, stop, API s, think s]
FIRST = {
    "shared_blocks": 2,
    "shared_id": "a",
    "requests": [
        [0, 0, 200, 5, 3, 0, "tool_use", 2, 0],
        [5, 0, 330, 5, 5, 3, "tool_use", 1, 3],
        [50, 0, 320, 5, 5, 4, "end_turn", 1, 44],
    ],
}
SECOND = {"shared_blocks": 2, "shared_id": "a", "requests": [[0, 0, 256, 5, 4, 0, "end_turn", 1, 0]]}


def request(t, tokens, ids, kind="n", **more):
    return {"t": t, "type": kind, "model": "m", "in": tokens, "out": 5, "hash_ids": ids, **more}


# The same two sessions in the weka format. The last block of the first prompt is incomplete.
WEKA_FIRST = {
    "id": "one",
    "models": ["m"],
    "block_size": 64,
    "hash_id_scope": "local",
    "tool_tokens": 100,
    "system_tokens": 30,
    "requests": [
        request(0, 200, [1, 2, 3, 4], api_time=2, think_time=0),
        request(5, 330, [1, 2, 3, 5, 6], "s", api_time=1, think_time=3, ttft=0.1),
        request(50, 320, [1, 2, 3, 5, 7], api_time=1),
    ],
}
WEKA_SECOND = WEKA_FIRST | {"id": "two", "requests": [request(0, 256, [1, 2, 8, 9], api_time=1)]}


def lines(path, *sessions):
    path.write_text("".join(json.dumps(session) + "\n" for session in sessions))
    return path


@pytest.fixture
def compact(tmp_path):
    return lines(tmp_path / "sessions.jsonl", FIRST, SECOND)


@pytest.fixture
def weka(tmp_path):
    folder = tmp_path / "weka"
    folder.mkdir()
    for session in (WEKA_FIRST, WEKA_SECOND):
        (folder / f"{session['id']}.json").write_text(json.dumps(session, indent=1))
    return folder


def loop(sessions, **options):
    return sessions.merge(**{"active": 1, "max_gap": 300, "chunk_blocks": 1} | options)


def hits_of(trace, host):
    result = trace.core.replay(host_chunks=host)
    return result["host_hits_of"].tolist()


def run(*arguments, status=0):
    result = CliRunner().invoke(app, ["replay", *map(str, arguments)])
    assert result.exit_code == status, f"{result.output}\n{result.exception!r}"
    return result


# ---- formats


@pytest.mark.parametrize("name", ["compact", "weka"])
def test_both_formats_hold_the_same_sessions(name, request):
    read = read_sessions(request.getfixturevalue(name))
    assert (len(read), read.requests, read.block_tokens, list(read.tokens)) == (
        2,
        4,
        64,
        [200, 330, 320, 256],
    )
    trace = loop(read)
    assert trace.ends.tolist() == [2, 6, 51, 52]
    assert trace.returns_at.tolist() == [5, 50, math.inf, math.inf]
    assert hits_of(trace, 100) == [0, 3, 4, 2], "the second session hits the text of the first one"
    assert trace.needed == pytest.approx((3 + 5 + 5 + 4) / 4)


def test_weka_sessions_may_be_lines_of_a_file(weka, tmp_path):
    path = lines(tmp_path / "weka.jsonl", WEKA_FIRST, WEKA_SECOND)
    assert hits_of(loop(read_sessions(path)), 100) == hits_of(loop(read_sessions(weka)), 100)
    assert len(read_sessions(path, limit=1)) == 1
    assert len(read_sessions(weka / "one.json")) == 1


def test_global_ids_are_shared_and_local_ids_are_not(tmp_path):
    for scope, hits in (("local", [0, 0]), ("global", [0, 2])):
        session = {"block_size": 64, "hash_id_scope": scope, "requests": [request(0, 128, [1, 2])]}
        path = lines(tmp_path / f"{scope}.jsonl", session, session)
        assert hits_of(loop(read_sessions(path)), 100) == hits, scope


def test_an_id_after_another_prefix_is_another_block(tmp_path):
    requests = [request(0, 128, [1, 2]), request(1, 128, [3, 2]), request(2, 128, [1, 2])]
    path = lines(tmp_path / "w.jsonl", {"block_size": 64, "hash_id_scope": "global", "requests": requests})
    trace = loop(read_sessions(path))
    assert hits_of(trace, 100) == [0, 0, 2]
    assert trace.unique_blocks() == 4


@pytest.mark.parametrize("begin", [100, 0], ids=["absolute", "relative"])
def test_sub_agents_of_weka_sessions_are_streams(tmp_path, begin):
    nested = [request(begin, 64, [50], api_time=1), request(begin + 3, 128, [50, 51], api_time=1)]
    outer = [
        request(90, 64, [1], api_time=5),
        {"t": 100, "type": "subagent", "agent_id": "x", "requests": nested},
        request(110, 128, [1, 2], api_time=1),
    ]
    path = lines(tmp_path / "w.jsonl", {"block_size": 64, "hash_id_scope": "local", "requests": outer})
    trace = loop(read_sessions(path))
    assert trace.ends.tolist() == [5, 11, 14, 21], "the clock begins with the session"
    assert trace.returns_at.tolist() == [20, 13, math.inf, math.inf]
    assert hits_of(trace, 100) == [0, 0, 1, 1]


def test_the_format_is_recognised(compact, weka, tmp_path):
    assert holds_sessions(compact)
    assert holds_sessions(weka)
    assert holds_sessions(weka / "one.json")
    assert not holds_sessions(lines(tmp_path / "mooncake.json", {"hash_ids": [1], "input_length": 5}))


def test_common_length():
    assert common_length([1, 2, 3], [1, 2, 4, 5]) == 2
    assert common_length([1, 2], [1, 2, 3]) == 2
    assert common_length([1], [2]) == 0
    assert common_length([], [2]) == 0


def compact_with(position, value):
    changed = [*FIRST["requests"][1]]
    changed[position] = value
    return FIRST | {"requests": [FIRST["requests"][0], changed]}


def weka_with(**changed):
    return WEKA_FIRST | {"requests": [WEKA_FIRST["requests"][0], WEKA_FIRST["requests"][1] | changed]}


@pytest.mark.parametrize(
    ("session", "part"),
    [
        ([1], "has no list `requests`"),
        ({"requests": []}, "neither block_size (weka format) nor shared_blocks (compact format)"),
        (FIRST | {"shared_blocks": -1}, "shared_blocks is -1; give an integer from 0"),
        (FIRST | {"shared_id": None}, "shared_id is null; give the name"),
        (FIRST | {"requests": [[1, 2]]}, "requests[0]: the request is [1, 2]; write [t, stream,"),
        (compact_with(0, -1), "requests[1]: t is -1; give seconds, 0 or more"),
        (compact_with(1, "x"), 'requests[1]: stream is "x"; give an integer from 0'),
        (compact_with(5, 4), "requests[1]: common blocks is 4; give at most 3"),
        (compact_with(7, None), "requests[1]: API seconds is null; give seconds"),
        (
            FIRST | {"requests": [compact_with(0, 5)["requests"][1], FIRST["requests"][0]]},
            "requests[0]: common blocks is 3; give at most 0",
        ),
        (
            FIRST | {"requests": [FIRST["requests"][0], *compact_with(0, 9)["requests"][1:], [8, *[0] * 8]]},
            "requests[2]: t is 8.0; give at least 9.0",
        ),
        (WEKA_FIRST | {"block_size": 0}, "block_size is 0; give an integer from 1"),
        (WEKA_FIRST | {"block_size": 32}, "block_size is 32; all sessions must have the same, 64 as before"),
        (WEKA_FIRST | {"hash_id_scope": "both"}, 'hash_id_scope is "both"; possible: local, global'),
        (WEKA_FIRST | {"tool_tokens": "x"}, 'tool_tokens is "x"; give an integer'),
        (weka_with(type="q"), 'requests[1]: type is "q"; possible: n, s, subagent'),
        (weka_with(t=None), "requests[1]: t is null; give seconds"),
        (weka_with(hash_ids=[1, "x"]), 'requests[1]: hash_ids is [1, "x"]; give a list of integers'),
        (weka_with(hash_ids=[True]), "requests[1]: hash_ids is [true]; give a list of integers"),
        (weka_with(api_time="x"), 'requests[1]: api_time is "x"; give seconds'),
        (weka_with(type="subagent"), "requests[1]: requests is null; give a list"),
        (weka_with(type="subagent", requests=[3]), "requests[1] requests[0]: the request is 3; write {"),
    ],
)
def test_an_invalid_session_is_named(tmp_path, session, part):
    path = lines(tmp_path / "bad.jsonl", FIRST, session)
    with pytest.raises(ValueError, match=r"bad\.jsonl:2\b") as caught:
        read_sessions(path)
    assert part in str(caught.value)


def test_text_that_is_not_json_is_named(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(FIRST) + "\n{\n")
    with pytest.raises(ValueError, match=r"bad\.jsonl:2 is not JSON"):
        read_sessions(path)


def test_a_folder_without_sessions_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"has no \*\.json file"):
        read_sessions(tmp_path)
    (tmp_path / "empty.json").write_text(json.dumps(FIRST | {"requests": []}))
    with pytest.raises(ValueError, match="has no request of an agent session"):
        read_sessions(tmp_path)


# ---- the closed loop


def test_the_next_session_begins_when_one_ends(compact):
    read = read_sessions(compact)
    assert loop(read).ends.tolist() == [2, 6, 51, 52]
    assert loop(read, active=2).ends.tolist() == [2, 1, 6, 51]
    assert loop(read, max_gap=10).ends.tolist() == [2, 6, 17, 18]


def test_a_seed_changes_the_order_of_sessions_and_repeats(tmp_path):
    sessions = [SECOND | {"requests": [[0, 0, 64 * n, 1, n, 0, "", 1, 0]]} for n in range(1, 20)]
    read = read_sessions(lines(tmp_path / "many.jsonl", *sessions))
    orders = [loop(read, seed=seed).lengths.tolist() for seed in (1, 1, 2, None)]
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]
    assert orders[3] == sorted(orders[0])


def test_the_order_and_the_chunks_decide_the_hits(compact):
    """The trace as the core merges it, and the same requests written by hand."""
    import numpy as np

    by_hand = core.Trace(
        np.array([1, 3, 5, 7], dtype=np.uint32), np.array([1, 1, 2, 1, 2, 1, 3], dtype=np.uint64)
    )
    trace = loop(read_sessions(compact), chunk_blocks=2)
    assert trace.block_tokens == 128
    for host in (1, 2, 3, 10):
        ours, theirs = (t.replay(host_chunks=host) for t in (trace.core, by_hand))
        assert ours.pop("host_hits_of").tolist() == theirs.pop("host_hits_of").tolist()
        assert ours.pop("tier_hits_of").tolist() == theirs.pop("tier_hits_of").tolist()
        assert ours == theirs


# ---- hints


def test_exact_hints_are_the_times_of_return(compact):
    from kv_offload.replay.hints import simulated_hints

    trace = loop(read_sessions(compact))
    assert simulated_hints(trace, "none") is None
    assert simulated_hints(trace, "exact").tolist() == [5, 50, math.inf, math.inf]


def test_one_bit_states_only_whether_the_session_returns_soon(compact):
    from kv_offload.replay.hints import simulated_hints

    trace = loop(read_sessions(compact))  # back after 3 s, after 44 s, never, never
    assert simulated_hints(trace, "one-bit").tolist() == [2 + 30, 6 + 300, 51 + 300, 52 + 300]
    assert simulated_hints(trace, "one-bit", wrong=1).tolist() == [2 + 300, 6 + 30, 51 + 30, 52 + 30]


def test_wrong_hints_depend_on_rate_and_seed(tmp_path):
    from kv_offload.replay.hints import simulated_hints

    requests = [[10 * n, 0, 64, 1, 1, 0, "", n % 7, 0] for n in range(400)]
    trace = loop(read_sessions(lines(tmp_path / "long.jsonl", SECOND | {"requests": requests})))
    right = simulated_hints(trace, "exact")
    wrong = [simulated_hints(trace, "exact", 0.5, seed) for seed in (1, 1, 2)]
    assert wrong[0].tolist() == wrong[1].tolist() != wrong[2].tolist()
    assert 100 < (wrong[0] != right).sum() < 200, "a half, of which a seventh is right by chance"
    gaps = {round(gap) for gap in (wrong[0] - trace.ends).tolist() if gap != math.inf}
    assert gaps == {4, 5, 6, 7, 8, 9, 10}, "gaps of other requests"


# ---- the command


def test_the_table_shows_need_time_and_bytes(compact):
    said = run(compact, "--active", 1, "--chunk", 1, "--token-bytes", "1KiB", "--policy", "lru").stdout
    for part in ("2 sessions, 1 active", "blocks of 64 tokens", "24%", "94%", "TTFT", "loaded", "KiB"):
        assert part in said, part


def test_the_report_of_sessions(compact):
    options = ("--active", 1, "--chunk", 1, "--host", "100%", "--host", 3, "--policy", "lru", "--json")
    found = json.loads(run(compact, *options, "--token-bytes", "1024", "--prefill-speed", 100).stdout)
    assert found["trace"]["needed_blocks"] == 4
    assert (found["trace"]["requests"], found["trace"]["sessions"]) == (4, 2)
    assert [row["host_blocks"] for row in found["replays"]] == [4, 3]
    row = found["replays"][0]
    assert row["of_needed"] == pytest.approx(4 / (17 / 4))
    assert row["loaded_bytes"] == row["hit_blocks"] * 64 * 1024
    assert row["stored_bytes"] == row["stored"] * 64 * 1024
    assert row["read_bytes"] == row["written_bytes"] == 0
    assert row["saved_prefill_seconds"] == pytest.approx(row["hit_blocks"] * 64 / 100)


def test_the_estimated_ttft(compact):
    """200, 330, 320 and 256 tokens, of which 0, 192, 256 and 128 are hit."""
    trace = loop(read_sessions(compact))
    speeds = Speeds(prefill=100, token_bytes=10, load=1000, disk=500)
    row = replay(trace.core, trace, Setting("lru", 100), speeds)
    seconds = sorted([2, 1.38 + 1.92, 0.64 + 2.56, 1.28 + 1.28])
    assert row["ttft_p50_seconds"] == pytest.approx((seconds[1] + seconds[2]) / 2)
    assert row["ttft_p95_seconds"] == pytest.approx(seconds[2] + 0.85 * (seconds[3] - seconds[2]))
    free = replay(trace.core, trace, Setting("lru", 100), Speeds(prefill=100))
    assert free["ttft_p95_seconds"] < row["ttft_p95_seconds"]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--hints", "some"), "--hints is 'some': use none, one-bit, exact"),
        (("--host", "0"), "--host is '0'; give at least 1 block, or a share such as 50%"),
        (("--host", "x%"), "--host is 'x%'"),
        (("--host", "nan%"), "--host is 'nan%'"),
        (("--host", "-5%"), "--host is '-5%'"),
        (("--load-speed", "0"), "--load-speed is '0'; give bytes per second"),
        (("--disk-speed", "fast"), "fast"),
    ],
)
def test_invalid_options_are_refused(compact, arguments, part):
    assert part in run(compact, *arguments, status=2).stderr


def test_hints_need_sessions(tmp_path):
    path = lines(tmp_path / "requests.jsonl", {"hash_ids": [1], "input_length": 64})
    assert "has no sessions" in run(path, "--hints", "exact", status=2).stderr


def test_the_chart(compact, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    path = tmp_path / "chart.svg"
    run(compact, "--active", 1, "--chunk", 1, "--plot", path)
    assert "<svg" in path.read_text()
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    said = run(compact, "--active", 1, "--chunk", 1, "--host", 5, "--policy", "lru", "--plot", path).stderr
    assert "matplotlib is not installed" in said
    assert "lru" in said


def test_a_text_chart_has_a_bar_for_each_policy():
    rows = [
        {"policy": policy, "host_blocks": blocks, "hit_ratio": rate}
        for blocks, policy, rate in ((2000, "lru", 0.5), (1000, "lru", 0.1), (1000, "prefix", 1.0))
    ]
    assert chart.text(chart.curves(rows)).splitlines() == [
        "1,000",
        f"  lru    {'#' * 5:50}  10.0%",
        f"  prefix {'#' * 50} 100.0%",
        "2,000",
        f"  lru    {'#' * 25:50}  50.0%",
    ]
