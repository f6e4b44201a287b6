"""Fails when a test that is written in tests/cpp is not in the test program.

    check_registered.py PROGRAM DIRECTORY

Files named gpu_* and fuzz_* are programs of their own, and so is cuda_on_threads.
"""

import re
import subprocess
import sys
from pathlib import Path

WRITTEN = re.compile(r"^\s*(?:TYPED_)?TEST(?:_F|_P)?\(\s*(\w+)\s*,\s*(\w+)\s*\)", re.MULTILINE)


def written_tests(directory: Path) -> dict[tuple[str, str], Path]:
    sources = [p for p in directory.rglob("*.cc") if not p.name.startswith(("gpu_", "fuzz_"))]
    sources = [p for p in sources if "cuda_on_threads" not in p.relative_to(directory).parts]
    return {test: path for path in sources for test in WRITTEN.findall(path.read_text())}


def registered_tests(listing: str) -> set[tuple[str, str]]:
    """Of `--gtest_list_tests`: "Prefix/Suite/0." and below it "  name/param  # comment"."""
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
    program, directory = sys.argv[1:]
    listing = subprocess.run([program, "--gtest_list_tests"], check=True, capture_output=True, text=True)
    written = written_tests(Path(directory))
    registered = registered_tests(listing.stdout)
    missing = {test: path for test, path in written.items() if test not in registered}
    for (suite, name), path in sorted(missing.items()):
        print(f"{path}: {suite}.{name} is not in {program}")
    print(f"{len(written)} tests written, {len(written) - len(missing)} registered")
    return 1 if missing or not written else 0


if __name__ == "__main__":
    sys.exit(main())
