# SPDX-License-Identifier: Apache-2.0
"""benchmarks/reload_gpu.py without a GPU and without servers: stored results, checks and comparisons."""

import json
import math
import sys
from collections import namedtuple
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples")]

import reload_gpu  # noqa: E402
import reporting  # noqa: E402
from local_server import Answer, LocalServer  # noqa: E402

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def results(tmp_path, monkeypatch):
    """Fakes a machine with a GPU for the benchmark, and yields an empty folder of results."""
    monkeypatch.setattr(reporting, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(reload_gpu.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(reload_gpu.torch.cuda, "get_device_name", lambda: "A GPU")
    monkeypatch.setattr(reload_gpu, "vllm_version", lambda: "0.32.0")
    monkeypatch.setattr(reload_gpu, "make_8b", lambda directory: directory)
    have_room(monkeypatch)
    return tmp_path / "results"


def have_room(monkeypatch, shm=2**40, disk=2**40):
    monkeypatch.setattr(
        reload_gpu.shutil, "disk_usage", lambda path: Usage(2**41, 0, shm if path == reload_gpu.SHM else disk)
    )


def times(seconds):
    lengths = reload_gpu.PROMPTS["8b"]
    prompts = sum(lengths.values())
    steps = {what: [seconds] * prompts for what in ("computed", "host", "disk")}
    return reload_gpu.Times(seconds=steps, worst_difference=0.0)


def run(monkeypatch, measured, *arguments):
    """Returns the exit status when each system returns its value in ``measured``, or raises it."""

    def measure(setup, name):
        if isinstance(measured[name], BaseException):
            raise measured[name]
        return measured[name]

    monkeypatch.setattr(reload_gpu, "measure", measure)
    monkeypatch.setattr(sys, "argv", ["reload_gpu.py", *arguments])
    return reload_gpu.main()


def kept(results):
    (path,) = results.glob("reload_gpu-8b-a-gpu-*.json")
    return json.loads(path.read_text())


def test_an_interrupted_run_keeps_the_measured_systems(results, monkeypatch):
    with pytest.raises(KeyboardInterrupt):
        run(monkeypatch, {"none": times(1.0), "kv_offload": times(0.1), "vllm": KeyboardInterrupt()})
    assert set(kept(results)["systems"]) == {"none", "kv_offload"}


def test_runs_of_single_systems_are_merged(results, monkeypatch):
    measured = {"none": times(1.0), "kv_offload": times(0.1), "vllm": times(0.2)}
    for name in measured:
        assert run(monkeypatch, measured, "--only", name) == 0
    found = kept(results)
    assert set(found["systems"]) == set(found["medians"]) == set(measured)
    assert {system: by["host"]["2048"] for system, by in found["medians"].items()} == {
        "none": 1.0, "kv_offload": 0.1, "vllm": 0.2,
    }  # fmt: skip


def test_runs_of_another_setup_are_not_merged(results, monkeypatch):
    measured = {"none": times(1.0), "kv_offload": times(0.1)}
    run(monkeypatch, measured, "--only", "none", "--graphs", "NONE")
    run(monkeypatch, measured, "--only", "kv_offload")
    assert set(kept(results)["systems"]) == {"kv_offload"}


@pytest.mark.parametrize(
    ("room", "said"),
    [({"shm": 8 * 2**30}, "/dev/shm, which has 8.0 free"), ({"disk": 4 * 2**30}, "which has 4.0 free")],
)
def test_missing_room_is_reported_before_a_server_starts(results, monkeypatch, capsys, room, said):
    have_room(monkeypatch, **room)
    assert run(monkeypatch, {"kv_offload": AssertionError("it started")}, "--only", "kv_offload") == 2
    assert said in capsys.readouterr().err


def test_a_server_without_a_connector_needs_no_room(results, monkeypatch):
    have_room(monkeypatch, shm=0, disk=0)
    assert run(monkeypatch, {"none": times(1.0)}, "--only", "none") == 0


def test_the_bound_of_a_directory_fits_all_records():
    setup = make_setup()
    prompts = [*setup.prompts(1), *setup.together()]
    answers = len(setup.together()) * reload_gpu.ANSWER
    tokens = sum(map(len, prompts)) + answers + sum(reload_gpu.WARM_UP_TOKENS)
    assert setup.written_bytes() == tokens * 128 * 1024
    assert setup.max_bytes() > setup.written_bytes()


def make_setup(graphs=True):
    return reload_gpu.Setup(Path("m"), "8b", "cuda", Path("d"), "40960MiB", [], 300, 120, graphs)


def test_warm_up_prompts_are_few_and_the_same_in_each_server():
    asked = []

    class Server:
        def ask(self, prompt, **options):
            asked[-1].append(prompt)

    for _ in range(2):
        asked.append([])
        reload_gpu.warm_up(Server(), make_setup())
    assert asked[0] == asked[1]
    assert sum(map(len, asked[0])) <= min(reload_gpu.PROMPTS["8b"])


@pytest.mark.parametrize("graphs", [True, False])
def test_servers_run_eagerly_only_without_graphs(tmp_path, monkeypatch, graphs):
    (tmp_path / "config.json").write_text('{"dtype": "bfloat16"}')
    setup = make_setup(graphs)
    setup.model = tmp_path
    server = setup.serve("none", "first")
    assert isinstance(server, LocalServer)
    assert ("--enforce-eager" in server.command()) is not graphs


def answer(*top):
    return Answer((max(top[0], key=top[0].get),), top, "", 0, 0.0)


def test_a_near_tie_gives_a_finite_difference_and_is_counted():
    measured = reload_gpu.Times()
    reload_gpu.compare([answer({1: -0.50, 2: -0.51})], [answer({1: -0.51, 2: -0.50})], measured)
    assert measured.other_tokens == 1
    assert measured.worst_difference == pytest.approx(0.01)


def test_answers_without_a_common_candidate_are_an_error():
    with pytest.raises(RuntimeError, match="no candidate in common"):
        reload_gpu.compare([answer({1: -0.5})], [answer({2: -0.5})], reload_gpu.Times())


def test_results_are_standard_json(results):
    with pytest.raises(ValueError, match="not JSON compliant"):
        reporting.write_results("anything", {"difference": math.inf})
