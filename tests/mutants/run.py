# SPDX-License-Identifier: Apache-2.0
"""Plants faults (mutants), one at a time, and checks that the tests detect them.

    python tests/mutants/run.py                  all of tests/mutants/*.toml
    python tests/mutants/run.py space cuda       some areas (names of the files)
    python tests/mutants/run.py --name reset     mutants whose names contain "reset"
    python tests/mutants/run.py --kind cpp       mutants of one kind of test: cpp, python, command
    python tests/mutants/run.py --part 2/8       the second of eight parts, to use several machines
    python tests/mutants/run.py --list

A mutant replaces text that occurs exactly once in one file and names the tests that must fail then.
Comments, and the places of line breaks in C++, need not match (see anchors.py)::

    [[mutant]]
    name = "an op reads its epoch when it runs"
    file = "csrc/backends/fs/record_writer.cc"
    find = '''...'''
    replace = '''...'''
    cpp = "FsTierReset.*"                           # a filter of kv_offload_tests, or
    python = "tests/python/test_config.py -k unit"  # arguments of pytest, or
    command = "bash tests/x.sh"                     # a shell command that must fail

Pytest uses the existing build of the core, so its tests do not detect faults in C++ code.
The checkout is never changed: the faults are planted in a copy of its files in build/mutants, or in the
directory that KV_OFFLOAD_MUTANTS names. Two concurrent runs need two directories. The named tests must pass
in the copy before their faults are planted; otherwise these mutants are skipped, because a test that fails
anyway detects nothing. A fault also counts as detected when its tests hang, provided that they finish in that
time without it. Exit status 0: all were detected; 1: some were not; 2: a mutant cannot be planted, or its
tests fail without it.

Pytest runs in forks of a process that has imported vLLM, which would take ten seconds each time. Tests that
fail there run in a process of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import anchors
import tomllib

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "python"))

from forked_process import Zygote  # noqa: E402
from vllm_trees import MODULES  # noqa: E402

PLACE = Path(os.environ.get("KV_OFFLOAD_MUTANTS", ROOT / "build" / "mutants")).resolve()
TREE = PLACE / "tree"
BUILD = PLACE / "cpp"
KINDS = ("cpp", "python", "command")
SECONDS = 600
READ_SOURCES = ("test_layers.py", "test_tier_verbs.py")  # Python tests that read the sources in C++
SHARDS = 4  # of the C++ tests, which mostly wait
# Tests that run this many times longer than without the fault, and at least this many seconds, are hanging.
SLOWER, LEAST_SECONDS = 5, 20
LATE = "seen: its tests do not end"
SEEN = ("seen", LATE)

# Python finds the package of an editable install by a list of files; this points the list to the copy.
SITE = """import sys
for finder in sys.meta_path:
    files = getattr(finder, "known_source_files", None)
    if files and "kv_offload" in files:
        finder.known_source_files = {name: path.replace(%r, %r, 1) for name, path in files.items()}
"""


@dataclass(frozen=True)
class Mutant:
    """One fault: its place, its text, and the tests that detect it."""

    area: str
    name: str
    file: str
    find: str
    replace: str
    kind: str  # one of KINDS
    tests: str


class NotPlantedError(Exception):
    """The mutant cannot be planted, or the tree does not build."""


def load(area: Path) -> list[Mutant]:
    mutants = []
    for entry in tomllib.loads(area.read_text())["mutant"]:
        kinds = [kind for kind in KINDS if kind in entry]
        unknown = set(entry) - {"name", "file", "find", "replace", *KINDS}
        if len(kinds) != 1 or unknown or not {"name", "file", "find", "replace"} <= set(entry):
            raise NotPlantedError(
                f"{area.name}: {entry.get('name', entry)!r} needs name, file, find, replace and one of"
                f" {', '.join(KINDS)}; it has {', '.join(sorted(entry))}"
            )
        path = ROOT / entry["file"]
        text = path.read_text() if path.is_file() else ""
        if (count := len(anchors.places(text, entry["find"], entry["file"]))) != 1:
            raise NotPlantedError(
                f"{area.name}: {entry['name']!r}: its text occurs {count} times in {entry['file']}"
            )
        reads_sources = any(test in entry.get("python", "") for test in READ_SOURCES)
        if "python" in entry and path.suffix in (".cc", ".h") and not reads_sources:
            raise NotPlantedError(
                f"{area.name}: {entry['name']!r} is in {entry['file']}, which pytest does not compile"
            )
        fault = [entry[field] for field in ("name", "file", "find", "replace")]
        mutants.append(Mutant(area.stem, *fault, kinds[0], entry[kinds[0]]))
    return mutants


def copy_tree() -> None:
    """Copies the files that git tracks, with uncommitted changes; unchanged files keep their times."""
    files = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, check=True
    )
    wanted = {name for name in files.stdout.decode().split("\0") if name and (ROOT / name).is_file()}
    for path in [path for path in TREE.rglob("*") if path.is_file()]:
        name = path.relative_to(TREE)
        if str(name) not in wanted and name.parts[0] not in (".git", "build"):
            path.unlink()
    for name in wanted:
        copy = TREE / name
        if not copy.exists() or copy.read_bytes() != (ROOT / name).read_bytes():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy)
    # Tests ask git which files belong to the project, and use the build products of the core.
    (TREE / ".git" / "index").unlink(missing_ok=True)
    for arguments in (["init", "--quiet"], ["add", "--", *sorted(wanted)]):
        status, output = run(["git", f"--git-dir={TREE / '.git'}", f"--work-tree={TREE}", *arguments])
        if status != 0:
            raise NotPlantedError(f"git {arguments[0]} in the copy fails:\n{output[-1000:]}")
    built = TREE / "build" / "cpp"
    if built.is_dir() and not built.is_symlink():
        shutil.rmtree(built)
    built.parent.mkdir(exist_ok=True)
    if not built.is_symlink():
        built.symlink_to(ROOT / "build" / "cpp")
    (TREE / "sitecustomize.py").write_text(SITE % (str(ROOT) + os.sep, str(TREE) + os.sep))


def environment() -> dict[str, str]:
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("GIT_")},
        "CCACHE_BASEDIR": str(TREE),
        "CCACHE_NOHASHDIR": "1",
        "KV_OFFLOAD_VLLM_TREES": os.pathsep.join(map(str, sorted((ROOT / ".cache").glob("vllm-*")))),
        "PYTHONPATH": f"{TREE}{os.pathsep}{TREE / 'tests' / 'python'}",
        "KV_OFFLOAD_RELEASES": "all",  # tests/python/conftest.py: some tests are under another release
        "PYTHONDONTWRITEBYTECODE": "1",  # a file that changes twice in a second would keep its compiled form
        "PYTEST_ADDOPTS": "-x",  # also for tests that run pytest: the first failure is enough
    }


def run(command: Sequence[str], *, seconds: int = SECONDS, **variables: str) -> tuple[int | None, str]:
    """Returns exit status (None after ``seconds``) and output. Ends all processes of the command."""
    begun = subprocess.Popen(
        command, cwd=TREE, env=environment() | variables, text=True, errors="replace",
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = begun.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        return None, ""
    finally:
        with suppress(ProcessLookupError):
            os.killpg(begun.pid, signal.SIGKILL)
        begun.wait()
    return begun.returncode, output


def build() -> tuple[int | None, str]:
    return run(["ninja", "-C", str(BUILD), "kv_offload_tests"], seconds=1800)


def configure() -> None:
    command = [
        "cmake",
        "-S",
        str(TREE),
        "-B",
        str(BUILD),
        "-G",
        "Ninja",
        "-DKV_OFFLOAD_DEVELOPER=ON",
        "-DKV_OFFLOAD_CUDA=OFF",
        "-DKV_OFFLOAD_UNITY=TESTS",
    ]
    linker = next((f"-fuse-ld={name}" for name in ("mold", "gold") if shutil.which(f"ld.{name}")), "")
    status, output = run(
        [
            *command,
            "-DCMAKE_BUILD_TYPE=None",
            "-DCMAKE_CXX_FLAGS=-O0 -w",  # a fault may leave a parameter unused
            # Otherwise linking, and copying objects into the archive, take half of the time of a mutant.
            f"-DCMAKE_EXE_LINKER_FLAGS={linker}",
            "-DCMAKE_CXX_ARCHIVE_CREATE=<CMAKE_AR> qcT <TARGET> <LINK_FLAGS> <OBJECTS>",
            f"-DPython_EXECUTABLE={sys.executable}",
        ]
    )
    if status == 0:
        status, output = build()
    if status != 0:
        raise NotPlantedError(f"the copy does not build:\n{output[-4000:]}")


def is_selected(test: str, tests: str) -> bool:
    """True if this GoogleTest filter selects the test."""
    wanted, _, unwanted = tests.partition("-")
    selects = [
        any(
            re.fullmatch(re.escape(pattern).replace(r"\*", ".*").replace(r"\?", "."), test)
            for pattern in patterns.split(":")
            if pattern
        )
        for patterns in (wanted or "*", unwanted)
    ]
    return selects == [True, False]


class Tests:
    """Runs the tests of mutants in the copy. Use it as a context manager."""

    def __init__(self) -> None:
        self._zygote: Zygote | None = None
        # Seconds per (kind, tests) without a fault; None: they fail, or there are none.
        self._usual_seconds: dict[tuple[str, str], float | None] = {}
        self._unforked: set[str] = set()  # tests that pass only in a process of their own
        self._cpp_seconds: dict[str, float | None] = {}  # of each C++ test; None: it fails

    def __enter__(self) -> Tests:
        return self

    def __exit__(self, *error: object) -> None:
        if self._zygote is not None:
            self._zygote.__exit__(None, None, None)

    def time_cpp(self, filters: set[str]) -> None:
        """Times the C++ tests that these filters select. For many filters, runs all C++ tests once."""
        if len(filters) > 100:
            with ThreadPoolExecutor(max_workers=SHARDS) as pool:
                for reports in pool.map(self._time_shard, range(SHARDS)):
                    self._cpp_seconds.update(reports)
        for tests in filters:
            self.usual_seconds("cpp", tests)

    def _time_shard(self, shard: int) -> dict[str, float | None]:
        report = PLACE / f"cpp-{shard}.json"
        report.unlink(missing_ok=True)
        run(
            [str(BUILD / "kv_offload_tests"), "--gtest_brief=1", f"--gtest_output=json:{report}"],
            seconds=3600,
            GTEST_TOTAL_SHARDS=str(SHARDS),
            GTEST_SHARD_INDEX=str(shard),
        )
        suites = json.loads(report.read_text())["testsuites"] if report.exists() else []
        return {
            f"{suite['name']}.{test['name']}": (
                None if "failures" in test else float(test["time"].removesuffix("s"))
            )
            for suite in suites
            for test in suite["testsuite"]
            if test["status"] == "RUN"
        }

    def usual_seconds(self, kind: str, tests: str) -> float | None:
        """Runs the tests at the first call, when no fault may be planted or built."""
        if kind == "cpp" and (kind, tests) not in self._usual_seconds:
            selected = [seconds for name, seconds in self._cpp_seconds.items() if is_selected(name, tests)]
            passed = [seconds for seconds in selected if seconds is not None]
            if passed and len(passed) == len(selected):
                self._usual_seconds[kind, tests] = sum(passed)
        if (kind, tests) not in self._usual_seconds:
            took, output = self._time(kind, tests)
            if took is None and kind == "python":
                self._unforked.add(tests)
                took, output = self._time(kind, tests)
            if took is None:
                print(f"without any fault {kind} {tests!r} fails or is empty:\n{output[-4000:]}", flush=True)
            self._usual_seconds[kind, tests] = took
        return self._usual_seconds[kind, tests]

    def _time(self, kind: str, tests: str) -> tuple[float | None, str]:
        began = time.monotonic()
        status, output = self.run(kind, tests, SECONDS)
        ran = {"cpp": "[==========] 0 tests" not in output, "python": " passed" in output}
        passed = status == 0 and ran.get(kind, True)
        return time.monotonic() - began if passed else None, output

    def run(self, kind: str, tests: str, seconds: int) -> tuple[int | None, str]:
        match kind:
            case "cpp":
                command = [str(BUILD / "kv_offload_tests"), "--gtest_brief=1", f"--gtest_filter={tests}"]
            case "python":
                command = ["pytest", "-q", "-x", "-p", "no:cacheprovider", *shlex.split(tests)]
                if tests not in self._unforked:
                    # The parent process imported pytest plugins with vLLM.
                    command += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
                    return self._run_forked(command, seconds)
                command = [sys.executable, "-m", *command]
            case _:
                command = ["bash", "-c", tests]
        return run(command, seconds=seconds)

    def _run_forked(self, command: Sequence[str], seconds: int) -> tuple[int | None, str]:
        if self._zygote is None:
            self._zygote = Zygote(PLACE / "zygote.log", environment(), MODULES)
            self._zygote.__enter__()
        log = PLACE / "pytest.log"
        log.unlink(missing_ok=True)
        begun = self._zygote.start(command, environment(), log, TREE)
        status = None
        try:
            status = begun.wait(seconds)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with suppress(ProcessLookupError):
                os.killpg(begun.pid, signal.SIGKILL)
            begun.wait()
        # Triton's bindings list leaked objects when Python exits.
        return status, log.read_text(errors="replace").partition("nanobind: leaked")[0]


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    path = TREE / mutant.file
    text = path.read_text()
    path.write_text(anchors.plant(text, mutant.find, mutant.replace, mutant.file))
    try:
        yield
    finally:
        path.write_text(text)


def verdict(mutant: Mutant, tests: Tests) -> str:
    """Returns seen, NOT SEEN, or the reason why the result is not known."""
    usual_seconds = tests.usual_seconds(mutant.kind, mutant.tests)
    if usual_seconds is None:
        return "its tests do not pass without it"
    # A command compiles first, so it gets the full time limit.
    seconds = SECONDS if mutant.kind == "command" else int(max(LEAST_SECONDS, SLOWER * usual_seconds))
    with planted(mutant):
        if mutant.kind == "cpp":
            status, output = build()
            if status != 0:
                return f"does not compile:\n{output[-2000:]}"
        status, _ = tests.run(mutant.kind, mutant.tests, seconds)
    if status is not None:
        return "seen" if status else "NOT SEEN"
    # The machine itself may be slow.
    if mutant.kind == "cpp":
        build()
    status, _ = tests.run(mutant.kind, mutant.tests, seconds)
    return LATE if status == 0 else "not known: its tests take as long without it"


def chosen(areas: list[str], name: str, kinds: Sequence[str]) -> list[Mutant]:
    files = {path.stem: path for path in sorted(Path(__file__).parent.glob("*.toml"))}
    if unknown := set(areas) - set(files):
        raise NotPlantedError(f"no area {', '.join(sorted(unknown))}; there are: {', '.join(files)}")
    mutants = [mutant for area in areas or files for mutant in load(files[area]) if name in mutant.name]
    twice = {mutant.name for mutant in mutants if sum(other.name == mutant.name for other in mutants) > 1}
    if twice:
        raise NotPlantedError(f"names that occur twice: {', '.join(sorted(twice))}")
    return [mutant for mutant in mutants if mutant.kind in kinds]


def part_of(mutants: list[Mutant], part: str) -> list[Mutant]:
    """Returns the K-th of N contiguous parts, for "K/N": neighbours share tests, which are timed once."""
    numbers = [int(number) if number.isdecimal() else 0 for number in part.split("/")]
    if len(numbers) != 2 or not 1 <= numbers[0] <= numbers[1]:
        raise NotPlantedError(f"--part {part}: K/N with 1 <= K <= N expected")
    k, n = numbers
    return mutants[len(mutants) * (k - 1) // n : len(mutants) * k // n]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("areas", nargs="*", help="files of tests/mutants, without .toml; default: all")
    parser.add_argument("--name", default="", help="only mutants whose names contain this")
    parser.add_argument(
        "--kind", choices=KINDS, action="append", help="only mutants that these tests must detect"
    )
    parser.add_argument("--part", default="1/1", metavar="K/N", help="only the K-th of N parts of them")
    parser.add_argument("--list", action="store_true", help="print them and stop")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # also ends the processes that this one started
    try:
        mutants = part_of(chosen(arguments.areas, arguments.name, arguments.kind or KINDS), arguments.part)
        if arguments.list:
            for mutant in mutants:
                print(f"{mutant.area}: {mutant.name}  [{mutant.kind} {mutant.tests}]")
            return 0
        copy_tree()
        if any(mutant.kind == "cpp" for mutant in mutants):
            configure()
    except NotPlantedError as error:
        print(error, file=sys.stderr)
        return 2
    verdicts = []
    with Tests() as tests:
        # Now, because later the build may contain a fault.
        tests.time_cpp({mutant.tests for mutant in mutants if mutant.kind == "cpp"})
        # Headers last: each causes many files to be rebuilt.
        for mutant in sorted(mutants, key=lambda mutant: mutant.kind == "cpp" and mutant.file.endswith(".h")):
            began = time.monotonic()
            verdicts.append(verdict(mutant, tests))
            print(
                f"{time.monotonic() - began:5.0f} s  {mutant.area}: {mutant.name}: {verdicts[-1]}", flush=True
            )
    seen = sum(word in SEEN for word in verdicts)
    print(f"{seen} of {len(verdicts)} planted faults were seen")
    if any(word not in (*SEEN, "NOT SEEN") for word in verdicts):
        return 2
    return 0 if seen == len(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
