# SPDX-License-Identifier: Apache-2.0
"""Fails when a source file does not name its licence.

    python tests/license_headers.py          lists the files that lack the line
    python tests/license_headers.py --add    adds it to them: as the first line, or after "#!"

Source files are those of PREFIXES that git tracks, or would track; empty ones need no licence.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import tomllib

ROOT = Path(__file__).resolve().parents[1]
PREFIXES = {
    **dict.fromkeys((".h", ".cc", ".cu", ".cuh"), "//"),
    **dict.fromkeys((".py", ".pyi", ".sh", ".cmake", "CMakeLists.txt"), "#"),
    **dict.fromkeys((".ci/run", ".ci/wheel"), "#"),
}


def prefix_of(name: str) -> str | None:
    """Returns the prefix of comments in the file; None if it is not a source file."""
    path = Path(name)
    return next((PREFIXES[key] for key in (name, path.name, path.suffix) if key in PREFIXES), None)


def line_for(name: str, licence: str) -> str:
    return f"{prefix_of(name)} SPDX-License-Identifier: {licence}\n"


def lacking(root: Path, licence: str) -> list[str]:
    command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    found = []
    for name in sorted(set(listed.split("\0"))):
        if prefix_of(name) is None or not (root / name).is_file():
            continue
        first = (root / name).read_text().splitlines(keepends=True)[:2]
        place = 1 if first and first[0].startswith("#!") else 0
        if first and first[place : place + 1] != [line_for(name, licence)]:
            found.append(name)
    return found


def add(path: Path, line: str) -> None:
    text = path.read_text()
    place = text.index("\n") + 1 if text.startswith("#!") else 0
    path.write_text(text[:place] + line + text[place:])


def main(arguments: list[str], root: Path = ROOT) -> int:
    if arguments not in ([], ["--add"]):
        print(__doc__)
        return 2
    licence = tomllib.loads((root / "pyproject.toml").read_text())["project"]["license"]
    names = lacking(root, licence)
    for name in names:
        if arguments:
            add(root / name, line_for(name, licence))
        else:
            print(f"{name}: no {line_for(name, licence).strip()!r}; python tests/license_headers.py --add")
    return 0 if arguments else int(bool(names))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
