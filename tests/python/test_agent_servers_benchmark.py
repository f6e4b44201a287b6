# SPDX-License-Identifier: Apache-2.0
"""benchmarks/agent_servers.py without servers: scaled sessions, hints, the proxy and the report."""

import http.client
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples")]

web = pytest.importorskip("aiohttp.web")

import hint_proxy  # noqa: E402
from scaled_sessions import Scale, Session, Turn, as_weka, choose, scale_down, write_weka  # noqa: E402

from kv_offload.replay.formats import read_sessions  # noqa: E402

# t, stream, input, output, blocks, common blocks, stop reason, API seconds, think seconds
REQUESTS = [
    [0.0, 0, 6400, 40, 100, 0, "tool_use", 8.0, 0.0],
    [4.0, 1, 6400, 40, 100, 0, "tool_use", 8.0, 0.0],  # a sub-agent
    [16.0, 0, 7680, 400, 120, 100, "tool_use", 4.0, 0.0],
    [24.0, 0, 7744, 4, 121, 119, "tool_use", 4.0, 0.0],
    [1000.0, 0, 8960, 80, 140, 60, "end_turn", 4.0, 0.0],
]
RECORDED = {"session": 0, "shared_blocks": 10, "shared_id": "a", "requests": REQUESTS}
SCALE = Scale(blocks=10, seconds=4, turns=4, max_pause=20)


def test_prompts_keep_their_share_of_the_previous_prompt():
    first, second, third, fourth = (turn.ids for turn in scale_down(RECORDED, "s", SCALE).turns)
    assert [len(ids) for ids in (first, second, third, fourth)] == [10, 12, 13, 15]
    assert second[:10] == first
    assert third[:12] == second, "one of 120 blocks is less than one of 12"
    assert fourth[:7] == third[:7], "6 of the 13 were replaced"
    assert not set(fourth[7:]) & {*first, *second, *third}


def test_sub_agents_are_left_out_and_times_are_scaled():
    turns = scale_down(RECORDED, "s", SCALE).turns
    assert [turn.answer for turn in turns] == [4, 40, 2, 8]
    assert [turn.pause for turn in turns] == [0, 2, 1, 20]
    assert [turn.duration for turn in turns] == [2, 1, 1, 1]


def test_the_trace_is_read_back_with_the_same_prompts_and_pauses(tmp_path):
    pytest.importorskip("kv_offload._core", reason="the core is not built")
    session = scale_down(RECORDED, "s", SCALE)
    trace = read_sessions(write_weka([session], tmp_path / "traces")).merge(active=1, chunk_blocks=1)
    assert trace.tokens == (10 + 12 + 13 + 15) * 64
    assert trace.unique == len({block for turn in session.turns for block in turn.ids})
    assert (trace.returns_at[:-1] - trace.ends[:-1]).tolist() == pytest.approx([2, 1, 20])


def test_aiperf_knows_the_keys_of_the_trace():
    """aiperf rejects other keys, and requires these."""
    weka = as_weka(scale_down(RECORDED, "s", SCALE))
    assert set(weka) == {"id", "models", "block_size", "hash_id_scope", "requests"}
    keys = {"t", "type", "model", "in", "out", "hash_ids", "api_time"}
    assert all(set(request) == keys for request in weka["requests"])


def test_rounds_have_other_sessions_with_different_first_answers():
    recorded = [RECORDED | {"session": number} for number in range(6)]
    recorded.insert(2, RECORDED | {"requests": REQUESTS[:3]})  # too short
    recorded.insert(2, RECORDED | {"requests": [[*one[:4], 900, *one[5:]] for one in REQUESTS]})  # too long
    rounds = [choose(recorded, 3, number, SCALE) for number in range(2)]
    assert [[session.turns[0].answer for session in one] for one in rounds] == [[4, 5, 6]] * 2
    assert len({session.name for one in rounds for session in one}) == 6
    with pytest.raises(ValueError, match="6 sessions have 4 turns"):
        choose(recorded, 3, 2, SCALE)


def session(name, *answers):
    return Session(name, tuple(Turn((1,), answer, 1.5 * place, 1) for place, answer in enumerate(answers)))


def test_a_turn_is_followed_by_its_pause_and_the_last_one_by_a_release():
    one = session("s", 5, 6, 7)
    assert [one.hint(turn) for turn in range(3)] == [
        {"type": "resume_in", "seconds": 1.5}, {"type": "resume_in", "seconds": 3.0}, {"type": "release"},
    ]  # fmt: skip


class FakeServer:
    """Returns two pieces of text and keeps the requests; fails from the request ``fails_from`` on."""

    def __init__(self, fails_from=100):
        self.bodies, self.fails_from = [], fails_from

    def __enter__(self):
        self.loop = hint_proxy.LoopThread()
        self.loop.call(self.start())
        return self

    def __exit__(self, *error):
        self.loop.call(self.runner.cleanup())
        self.loop.close()

    async def start(self):
        application = web.Application()
        application.router.add_post("/v1/chat/completions", self.answer)
        self.runner = web.AppRunner(application)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.port = self.runner.addresses[0][1]

    async def answer(self, request):
        self.bodies.append(await request.json())
        if len(self.bodies) > self.fails_from:
            return web.json_response({"error": "no memory"}, status=500)
        reply = web.StreamResponse()
        reply.content_type = "text/event-stream"
        await reply.prepare(request)
        for piece in (b"data: one\n\n", b"data: [DONE]\n\n"):
            await reply.write(piece)
        return reply


def ask(proxy, name, answer):
    """Returns (status, text) of one request."""
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=30)
    body = json.dumps({"messages": [], "max_completion_tokens": answer})
    connection.request("POST", "/v1/chat/completions", body, {"X-Correlation-ID": name})
    reply = connection.getresponse()
    found = reply.status, reply.read().decode()
    connection.close()
    return found


TURNS = [("x", 5), ("y", 8), ("x", 6), ("y", 6)]


@pytest.mark.parametrize("hints", [True, False])
def test_the_proxy_adds_the_hint_of_each_turn_and_only_that(hints):
    one, other = session("one", 5, 6), session("other", 8, 6)
    with FakeServer() as server, hint_proxy.HintProxy(server.port, hints) as proxy:
        proxy.expect([one, other])
        replies = [ask(proxy, name, answer) for name, answer in TURNS]
        assert (proxy.failures, proxy.left) == ([], 0)
    assert replies == [(200, "data: one\n\ndata: [DONE]\n\n")] * 4
    expected = [one.hint(0), other.hint(0), one.hint(1), other.hint(1)]
    for (name, answer), hint, body in zip(TURNS, expected, server.bodies, strict=True):
        told = {"kv_offload_hints": {"version": 1, "session": name, "actions": [hint]}}
        plain = {"messages": [], "max_completion_tokens": answer}
        assert body == (plain | {"kv_transfer_params": told} if hints else plain)


@pytest.mark.parametrize(
    ("requests", "said"),
    [
        ([("x", 7)], "no session begins with an answer of 7 tokens"),
        ([("x", 5), ("y", 5)], "no session begins with an answer of 5 tokens"),
        ([("x", 5), ("x", 8)], "turn 1 of one has 6 tokens, not 8"),
        ([("x", 5), ("x", 6), ("x", 6)], "one has 2 turns"),
    ],
)
def test_a_request_of_no_known_turn_is_a_failure(requests, said):
    with FakeServer() as server, hint_proxy.HintProxy(server.port, hints=True) as proxy:
        proxy.expect([session("one", 5, 6)])
        statuses = [ask(proxy, *request)[0] for request in requests]
        assert statuses == [200] * (len(requests) - 1) + [400]
        assert len(proxy.failures) == 1
        assert said in proxy.failures[0]


def test_a_failed_request_is_passed_on_and_counted():
    with FakeServer(fails_from=1) as server, hint_proxy.HintProxy(server.port, hints=False) as proxy:
        proxy.expect([session("one", 5, 6)])
        assert ask(proxy, "x", 5)[0] == 200
        assert ask(proxy, "x", 6) == (500, '{"error": "no memory"}')
        assert proxy.failures == ['500: {"error": "no memory"}']


@pytest.fixture
def benchmark():
    pytest.importorskip("torch")
    import agent_servers

    return agent_servers


RESULT = {
    "time_to_first_token": {"unit": "ms", "p50": 250.0, "p95": 1500.0},
    "benchmark_duration": {"unit": "sec", "avg": 60.0},
    "request_count": {"avg": 12.0},
    "error_summary": [],
    "was_cancelled": False,
}


def test_results_of_aiperf_are_in_seconds(benchmark):
    figures = benchmark.read_result(RESULT, 12)
    assert figures == pytest.approx({"ttft_p50": 0.25, "ttft_p95": 1.5, "total": 60.0})


@pytest.mark.parametrize(
    "wrong",
    [
        {"request_count": {"avg": 11.0}},
        {"error_request_count": {"avg": 1.0}},
        {"was_cancelled": True},
        {"error_summary": [{"error_details": {"message": "closed"}, "count": 1}]},
        {"time_to_first_token": {"unit": "sec", "p50": 0.25, "p95": 1.5}},
    ],
)
def test_a_result_with_failed_or_missing_requests_is_refused(benchmark, wrong):
    with pytest.raises(RuntimeError, match="aiperf: "):
        benchmark.read_result(RESULT | wrong, 12)


def played(total, p95=2.0, loaded=0):
    return {
        "ttft_p50": 1.0,
        "ttft_p95": p95,
        "total": total,
        "prompt": 1000,
        "loaded": loaded,
        "gpu_hits": 250,
    }


def test_ratios_are_of_the_same_round_and_losses_are_bold(benchmark):
    """In each round this plugin takes half as long, and its TTFT is worse. Medians alone would give 0.2."""
    found = benchmark.summarize(
        {
            "none": [played(10), played(100), played(40)],
            "kv_offload": [played(5, p95=4.0, loaded=500), played(50, p95=4.0), played(20, p95=4.0)],
        }
    )
    assert list(found["times_as_fast"]) == ["kv_offload to none"]
    assert found["times_as_fast"]["kv_offload to none"]["total"] == {"median": 2, "low": 2, "high": 2}
    assert found["systems"]["kv_offload"]["loaded"] == pytest.approx(1 / 6)
    text = benchmark.tables(found)
    assert "| this plugin | 1.00 s | 4.00 s | 20.00 s | 17% | 25% |" in text
    last = text.splitlines()[-1]
    assert last == (
        "| this plugin | no connector | 1.00 (1.00 to 1.00) | **0.50 (0.50 to 0.50)** | 2.00 (2.00 to 2.00) |"
    )


def test_each_system_begins_a_round_in_turn(benchmark):
    orders = [benchmark.rotated("abc", number) for number in range(3)]
    assert ["".join(order) for order in orders] == ["abc", "bca", "cab"]
    assert {order[2] for order in orders} == set("abc")


def test_all_systems_have_the_same_host_memory_and_nothing_below_it(benchmark):
    configs = {system: benchmark.kv_transfer(system, 96) for system in benchmark.SYSTEMS}
    assert configs.pop("none") is None
    extra = {system: config["kv_connector_extra_config"] for system, config in configs.items()}
    assert extra["kv_offload"] == extra["kv_offload-hints"]
    assert extra["kv_offload"]["cpu_bytes_to_use"] == "96MiB"
    assert extra["vllm"]["cpu_bytes_to_use"] == 96 * 1024**2
    arguments = extra["lmcache"]["lmcache.mp.autostart.server_args"]
    assert "--l1-size-gb 0.09375 " in arguments
    assert "l2-adapter" not in arguments
    assert not any("secondary_tiers" in one for one in extra.values())


def test_the_size_of_a_token_is_that_of_the_model(benchmark):
    assert benchmark.kv_bytes_per_token("small") == 8 * 1024
    assert benchmark.kv_bytes_per_token("large") == 16 * 1024
