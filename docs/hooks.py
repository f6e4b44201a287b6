# SPDX-License-Identifier: Apache-2.0
"""Hooks for mkdocs that add the pages and pictures outside of docs/ to the site."""

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

# Project files that become pages, and their place in the site.
PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "tests/README.md": "tests.md",
}
LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|#)([^)]+)\)")


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages that are elsewhere in the project."""
    from mkdocs.structure.files import File

    for source, place in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, place, content=relinked(text, source)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Returns a page of docs/ with its links to files of PAGES changed to their pages of the site.

    In the repository these links name the files themselves.
    """
    folder = posixpath.dirname(page.file.src_uri)

    def link(found: re.Match[str]) -> str:
        text, target = found.groups()
        path, _, anchor = target.partition("#")
        place = PAGES.get(posixpath.normpath(posixpath.join("docs", folder, path)))
        if place is None:
            return found[0]
        return f"[{text}]({posixpath.relpath(place, folder or '.')}{'#' + anchor if anchor else ''})"

    return markdown if page.file.src_uri in PAGES.values() else LINK.sub(link, markdown)


def relinked(text: str, source: str) -> str:
    """Returns the text with links to pages of the site; a file without a page loses its link."""

    def link(found: re.Match[str]) -> str:
        text, target = found.groups()
        path, _, anchor = target.partition("#")
        name = (ROOT / source).parent.joinpath(path).resolve().relative_to(ROOT).as_posix()
        place = PAGES.get(name) or (name.removeprefix("docs/") if name.startswith("docs/") else None)
        if place is None:
            return f"`{name}`"
        return f"[{text}]({place}{'#' + anchor if anchor else ''})"

    return LINK.sub(link, text)
