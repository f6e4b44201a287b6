# SPDX-License-Identifier: Apache-2.0
"""Fails if a test in the sources of tests/cpp is missing from the test program.

    check_registered.py PROGRAM DIRECTORY          all tests
    check_registered.py PROGRAM DIRECTORY --plain  tests of files that check for a sanitizer

Files named gpu_* and fuzz_*, and the folders fake_cuda and steps, are separate programs.

A test may do less, or nothing, under a sanitizer; it must then also run without one. The include of
test_iterations.h marks these tests, and CMakeLists.txt lists their files (plain_tests). No other code may
check for a sanitizer, and no header or source without tests may hide the check.
"""

import re
import subprocess
import sys
from pathlib import Path

WRITTEN = re.compile(r"^\s*(?:TYPED_)?TEST(?:_F|_P)?\(\s*(\w+)\s*,\s*(\w+)\s*\)", re.MULTILINE)
PROGRAMS = {"fake_cuda", "steps"}  # folders
ITERATIONS = '#include "test_iterations.h"'
ASKS = re.compile(r"__SANITIZE_|__has_feature|kSanitized|test_iterations\.h")


def sources_of(directory: Path) -> dict[Path, str]:
    paths = [p for p in directory.rglob("*") if p.suffix in (".cc", ".h")]
    paths = [p for p in paths if not p.name.startswith(("gpu_", "fuzz_")) and p.name != "test_iterations.h"]
    paths = [p for p in paths if not PROGRAMS.intersection(p.relative_to(directory).parts)]
    return {path: path.read_text() for path in paths}


def written_tests(sources: dict[Path, str]) -> dict[tuple[str, str], Path]:
    return {test: path for path, text in sources.items() for test in WRITTEN.findall(text)}


def hidden_questions(sources: dict[Path, str]) -> list[Path]:
    """Returns the files that check for a sanitizer but are not marked by the include of test_iterations.h."""
    return [
        path
        for path, text in sources.items()
        if ASKS.search(text)
        and (path.suffix == ".h" or ITERATIONS not in text.splitlines() or not WRITTEN.search(text))
    ]


def registered_tests(listing: str) -> set[tuple[str, str]]:
    """Parses the output of `--gtest_list_tests`: "Prefix/Suite/0.", then lines "  name/param  # comment"."""
    tests = set()
    suite: list[str] = []
    for line in listing.splitlines():
        words = line.split("#")[0].strip()
        if not line.startswith(" "):
            suite = words.rstrip(".").split("/")
        elif words:
            tests.update((part, words.split("/")[0]) for part in suite)
    return tests


def main() -> int:
    program, directory, *options = sys.argv[1:]
    listing = subprocess.run([program, "--gtest_list_tests"], check=True, capture_output=True, text=True)
    sources = sources_of(Path(directory))
    hidden = hidden_questions(sources)
    for path in hidden:
        print(f"{path}: checks for a sanitizer; only a test file that includes test_iterations.h may do so")
    if "--plain" in options:
        sources = {path: text for path, text in sources.items() if ITERATIONS in text.splitlines()}
    written = written_tests(sources)
    registered = registered_tests(listing.stdout)
    missing = {test: path for test, path in written.items() if test not in registered}
    for (suite, name), path in sorted(missing.items()):
        print(f"{path}: {suite}.{name} is not in {program}")
    print(f"{len(written)} tests written, {len(written) - len(missing)} registered")
    return 1 if missing or hidden or not written else 0


if __name__ == "__main__":
    sys.exit(main())
