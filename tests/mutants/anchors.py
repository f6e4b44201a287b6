# SPDX-License-Identifier: Apache-2.0
"""Finds the place of a planted fault, even if its comments were reworded or its lines wrapped since.

A text that does not occur as it is written is compared as tokens of the language, without comments and
space. Python's line ends and indentation are tokens too, because they are part of its syntax.
"""

import re
from functools import lru_cache
from pathlib import PurePath

_CODE = r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|\w+|[^\w\s]'
_C = re.compile(rf"(?P<skip>//[^\n]*|/\*.*?\*/|\s+)|{_CODE}", re.DOTALL)
_PYTHON = re.compile(rf"(?P<skip>[ \t]*#[^\n]*|\n(?=[ \t]*(?:#|\n))|(?<=\S)[ \t]+)|\n[ \t]*|{_CODE}")
_SYNTAX = {".h": _C, ".cc": _C, ".cu": _C, ".cuh": _C, ".py": _PYTHON, ".pyi": _PYTHON}

# (first character, character after the last one)
Span = tuple[int, int]


@lru_cache(maxsize=64)
def _tokens(text: str, syntax: re.Pattern[str]) -> list[tuple[str, Span]]:
    return [(m.group(), m.span()) for m in syntax.finditer(text) if m.lastgroup != "skip"]


def places(text: str, find: str, file: str) -> list[Span]:
    """Returns where ``find`` occurs in ``text``, the content of ``file``."""
    exact = [m.span() for m in re.finditer(re.escape(find), text)]
    syntax = _SYNTAX.get(PurePath(file).suffix)
    if exact or syntax is None:
        return exact
    wanted = [word for word, _ in _tokens(find.strip(), syntax)]
    found = _tokens(text, syntax)
    words = [word for word, _ in found]
    starts = [i for i in range(len(words)) if wanted and words[i : i + len(wanted)] == wanted]
    return [(found[i][1][0], found[i + len(wanted) - 1][1][1]) for i in starts]


def plant(text: str, find: str, replace: str, file: str) -> str:
    """Returns ``text`` with the fault. REQUIRES: ``find`` occurs once."""
    ((start, end),) = places(text, find, file)
    if text[start:end] != find:  # found as tokens: the space around them stays
        before, after = find[: -len(find.lstrip())], find[len(find.rstrip()) :]
        replace = replace.removeprefix(before).removesuffix(after)
    return text[:start] + replace + text[end:]
