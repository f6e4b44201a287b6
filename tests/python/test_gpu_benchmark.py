# SPDX-License-Identifier: Apache-2.0
"""benchmarks/gpu/run.sh and copy_gpu.py, with fakes for CMake, CUDA and the measuring programs."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

STANDS_IN = """#!/bin/bash
echo "$(basename "$0") $*" >>calls
"""
# Builds programs that are older than the sources.
CMAKE = """
[ "$1" = --build ] || exit 0
mkdir -p "$2"
for program in gpu_tests copy_gpu; do
  [ "$2/$program" -nt sources ] || cp "bin/$program" "$2/"
done
"""
CONNECTIONS = 'echo "connections $CUDA_DEVICE_MAX_CONNECTIONS" >>calls\n'
A_TEST_RUNS = 'echo "[       OK ] Gpu.pinning_reports (0 ms)"\n'
# The output without a GPU, and more text than a pipe holds.
NO_GPU = 'echo "[  SKIPPED ] Gpu.pinning_reports (0 ms)"; for i in {1..20000}; do echo "$i bottles"; done'
BENCHMARK = "mkdir -p benchmarks/results; echo {} >benchmarks/results/copy_gpu-a-b.json\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "benchmarks/gpu").mkdir(parents=True)
    shutil.copy(BENCHMARKS / "gpu/run.sh", tmp_path / "benchmarks/gpu")
    for name, body in {
        "cmake": CMAKE,
        "gpu_tests": A_TEST_RUNS + CONNECTIONS,
        "copy_gpu": "",
        "compute-sanitizer": CONNECTIONS,
        "nvidia-smi": "",
        "python3": BENCHMARK + CONNECTIONS,
    }.items():
        stand_in(tmp_path, name, body)
    (tmp_path / "sources").touch()
    age(tmp_path)
    return tmp_path


def stand_in(tree: Path, name: str, body: str) -> None:
    program = tree / "bin" / name
    program.parent.mkdir(exist_ok=True)
    program.write_text(STANDS_IN + body)
    program.chmod(0o755)


def age(tree: Path) -> None:
    """Makes all files one minute older, so that files written now are newer by more than a clock tick."""
    for path in tree.rglob("*"):
        moment = path.stat().st_mtime_ns - 60_000_000_000
        os.utime(path, ns=(moment, moment))


def run(tree: Path, *words: str) -> tuple[int, list[str], str]:
    """Returns the exit status, the calls, and the output."""
    (tree / "calls").unlink(missing_ok=True)
    (tree / "out").mkdir(exist_ok=True)
    environment = {
        **os.environ,
        "PATH": f"{tree / 'bin'}:{os.environ['PATH']}",
        "OUT": str(tree / "out"),
    }
    environment.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    done = subprocess.run(
        ["bash", "benchmarks/gpu/run.sh", *words],
        cwd=tree, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    calls = (tree / "calls").read_text().splitlines()
    age(tree)
    return done.returncode, [call for call in calls if not call.startswith("nvidia-smi")], done.stdout


def programs(calls: list[str]) -> set[str]:
    return {call.split()[0] for call in calls} - {"connections"}


EVERYTHING = {"cmake", "gpu_tests", "compute-sanitizer", "python3"}


def test_finished_parts_are_repeated_only_with_other_programs(tree):
    status, calls, said = run(tree)
    assert (status, programs(calls)) == (0, EVERYTHING), said
    status, calls, said = run(tree)
    assert (status, programs(calls)) == (0, {"cmake"}), said
    (tree / "sources").touch()
    status, calls, said = run(tree)
    assert (status, programs(calls)) == (0, EVERYTHING), said


@pytest.mark.parametrize(("part", "called"), [("build", {"cmake"}), ("tests", {"cmake", "gpu_tests"})])
def test_a_named_part_is_repeated_and_no_other(tree, part, called):
    run(tree)
    status, calls, said = run(tree, part)
    assert (status, programs(calls)) == (0, called), said


def test_a_build_that_fails_stops_the_rest(tree):
    stand_in(tree, "cmake", "exit 1")
    status, calls, said = run(tree)
    assert (status, programs(calls)) == (1, {"cmake"}), said


@pytest.mark.parametrize("part", ["tests", "memcheck"])
@pytest.mark.parametrize("body", [NO_GPU, 'echo "[==========] 0 tests from 0 test suites ran."\n'])
def test_skipped_or_missing_tests_have_not_passed(tree, part, body):
    stand_in(tree, "gpu_tests", body)
    status, _, said = run(tree, part)
    assert status == 1
    assert "there is no GPU" in said


def test_another_gpu_is_measured_too(tree):
    run(tree)
    stand_in(tree, "nvidia-smi", "echo another\n")
    status, calls, said = run(tree)
    assert (status, programs(calls)) == (0, EVERYTHING), said


@pytest.mark.parametrize(("part", "connections"), [("tests", "32"), ("memcheck", "32"), ("bench", "")])
def test_streams_have_their_own_connections_where_tests_block_some(tree, part, connections):
    _, calls, _ = run(tree, part)
    assert {call for call in calls if call.startswith("connections")} == {f"connections {connections}"}


def test_memcheck_does_not_report_intentional_api_errors(tree):
    _, calls, _ = run(tree, "memcheck")
    (call,) = (call for call in calls if call.startswith("compute-sanitizer"))
    assert "--tool memcheck --report-api-errors no " in call


def test_results_of_an_interrupted_benchmark_are_copied(tree):
    stand_in(tree, "python3", BENCHMARK + "exit 1")
    status, _, _ = run(tree, "bench")
    assert status == 1
    assert (tree / "out/copy_gpu-a-b.json").exists()


HEADER = {"device": "A GPU", "table": "measured"}
DECODE = {
    "question": "decode", "path": "dma", "direction": "load", "setting": "s", "slowed": 0.0,
    "copies_alone": 1e-6, "copies_beside": 1e-6, "copies_beside_p99": 1e-6, "rate": 1e9,
}  # fmt: skip
SUBMIT = {"question": "submit", "segments": 1, "seconds": 1e-6}


@pytest.fixture
def benchmark(tmp_path: Path) -> Path:
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    for name in ("copy_gpu.py", "reporting.py"):
        shutil.copy(BENCHMARKS / name, folder)
    (folder / "vllm_copy.py").write_text('class VllmCopies:\n    missing = "not here"\n    version = ""\n')
    return folder


def measure(folder: Path, lines: list[dict], last: str = "") -> tuple[int, dict]:
    """Runs a program that prints these lines, then ``last``. Returns exit status and stored results."""
    program = folder / "program"
    program.write_text("#!/bin/bash\n" + "".join(f"echo '{json.dumps(line)}'\n" for line in lines) + last)
    program.chmod(0o755)
    command = [sys.executable, folder / "copy_gpu.py", "--program", program]
    status = subprocess.run(command, stdout=subprocess.DEVNULL, timeout=240).returncode
    (kept,) = (folder / "results").glob("copy_gpu-a-gpu-*.json")
    return status, json.loads(kept.read_text())


def test_measurements_before_a_program_failure_are_kept(benchmark):
    status, kept = measure(benchmark, [HEADER, DECODE, SUBMIT], "exit 3")
    assert status == 3
    assert kept["complete"] is False
    assert kept["rows"] == [DECODE, SUBMIT]


def test_measurements_before_a_kill_are_kept(benchmark):
    # More than a pipe holds: once all is written, the reader has processed the first part.
    status, kept = measure(benchmark, [HEADER, DECODE, *[SUBMIT] * 5000], "kill -9 $PPID")
    assert status == -9
    assert kept["complete"] is False
    assert kept["rows"] == [DECODE]


def test_results_are_complete_at_the_end(benchmark):
    status, kept = measure(benchmark, [HEADER, SUBMIT])
    assert status == 0
    assert kept["complete"] is True


def test_an_interrupted_run_keeps_earlier_measurements(benchmark):
    _, before = measure(benchmark, [HEADER, SUBMIT])
    (folder,) = {path.parent for path in benchmark.glob("results/*.json")}
    (whole,) = folder.glob("*.json")
    whole.rename(folder / "whole")
    measure(benchmark, [HEADER, DECODE, SUBMIT], "exit 3")
    (partly,) = folder.glob("*.json")
    assert partly.name != whole.name
    assert json.loads((folder / "whole").read_text()) == before


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_the_programs_are_compiled_for_the_gpus_of_this_machine(tree):
    stand_in(tree, "nvidia-smi", "printf '9.0\\n10.3\\n9.0\\n'")
    (tree / "bin/cmake").unlink()
    command = ["cmake", "-G", "Ninja", "-S", BENCHMARKS / "gpu", "-B", tree / "build"]
    environment = {**os.environ, "PATH": f"{tree / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run(
        command, cwd=tree, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert done.returncode == 0, done.stdout
    kernels = [line for line in (tree / "build/build.ninja").read_text().splitlines() if "-lineinfo" in line]
    assert kernels
    for line in kernels:
        assert "sm_90" in line
        assert "sm_103" in line
        assert "-std=c++17" in line
