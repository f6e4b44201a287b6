# SPDX-License-Identifier: Apache-2.0
"""Readers of recorded agent sessions. docs/operations/replay.md describes the two formats:

weka      one JSON object per session, in a file each (a directory) or in a line each. kv-cache-tester and
          aiperf use it. ``hash_ids`` lists the whole prompt of each request; sub-agents are nested.
compact   one JSON object per line and session. Each request has the number of its blocks, and how many of
          them are those of the previous request of its stream.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

from kv_offload.replay.sessions import Sessions

COMPACT_BLOCK_TOKENS = 64
COMPACT_REQUEST = (
    "[t, stream, input tokens, output tokens, prompt blocks, common blocks, stop reason, API seconds, "
    "think seconds]"
)
WEKA_REQUEST = '{"t": 0.0, "type": "n", "in": 128, "out": 10, "hash_ids": [1, 2], "api_time": 1.5}'
KINDS = ("n", "s", "subagent")
SCOPES = ("local", "global")


def holds_sessions(path: Path) -> bool:
    """True if the path holds agent sessions: a directory, or a file whose first object has ``requests``."""
    if path.is_dir():
        return True
    with path.open(encoding="utf-8") as lines:
        first = next((line for line in lines if line.strip()), "")
    try:
        found = json.loads(first)
    except ValueError:
        return path.suffix == ".json"  # one object in several lines
    return isinstance(found, dict) and "requests" in found


def read_sessions(path: Path, limit: int | None = None) -> Sessions:
    """Reads the first ``limit`` sessions, or all. Raises ValueError naming the file, line and value."""
    reader = _Reader()
    for where, session in _objects(path):
        if limit is not None and len(reader.sessions) >= limit:
            break
        reader.read(where, session)
    if not reader.sessions.requests:
        raise ValueError(
            f"{path} has no request of an agent session; give sessions in the weka or compact format"
        )
    return reader.sessions


def _objects(path: Path) -> Iterator[tuple[str, Any]]:
    if path.is_dir():
        files = sorted(path.glob("*.json"))
        if not files:
            raise ValueError(f"{path} has no *.json file; give a directory with one file per session")
        for file in files:
            yield str(file), _parsed(str(file), file.read_text(encoding="utf-8"))
    elif path.suffix == ".json":
        yield str(path), _parsed(str(path), path.read_text(encoding="utf-8"))
    else:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield f"{path}:{number}", _parsed(f"{path}:{number}", line)


def _parsed(where: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON ({error}); write one object per session") from error


def _fail(where: str, name: str, value: object, possible: str) -> NoReturn:
    shown = json.dumps(value)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    raise ValueError(f"{where}: {name} is {shown}; {possible}")


def _count(where: str, name: str, value: object, least: int = 0) -> int:
    if type(value) is not int or not least <= value < 2**32:
        _fail(where, name, value, f"give an integer from {least}")
    return value


def _seconds(where: str, name: str, value: object) -> float:
    if type(value) not in (int, float) or not math.isfinite(value) or value < 0:  # type: ignore[arg-type,operator]
        _fail(where, name, value, "give seconds, 0 or more")
    return float(value)  # type: ignore[arg-type]


@dataclass
class _Request:
    """One request of a weka session."""

    time: float
    stream: int
    duration: float
    tokens: int
    ids: list[int]  # of its blocks, as in the file


@dataclass
class _Reader:
    sessions: Sessions = field(default_factory=Sessions)
    _last_block: int = 0
    _shared: dict[object, list[int]] = field(default_factory=dict)  # blocks by the name of the shared text
    _global: dict[tuple[int, int], int] = field(default_factory=dict)  # (previous block, id) -> block

    def read(self, where: str, session: object) -> None:
        if not isinstance(session, dict) or not isinstance(session.get("requests"), list):
            raise ValueError(f"{where} has no list `requests`; write one object per session")
        if "hash_id_scope" in session or "block_size" in session:
            self._read_weka(where, session)
        elif "shared_blocks" in session:
            self._read_compact(where, session)
        else:
            raise ValueError(
                f"{where} has neither block_size (weka format) nor shared_blocks (compact format)"
            )

    def _set_block_tokens(self, where: str, tokens: int) -> None:
        known = self.sessions.block_tokens
        if known not in (0, tokens):
            _fail(where, "block_size", tokens, f"all sessions must have the same, {known} as before")
        self.sessions.block_tokens = tokens

    def _new(self, count: int) -> range:
        self._last_block += count
        return range(self._last_block - count, self._last_block)

    def _shared_blocks(self, name: object, most: int) -> list[int]:
        found = self._shared.setdefault(name, [])
        found.extend(self._new(max(0, most - len(found))))
        return found[:most]

    # ---- compact

    def _read_compact(self, where: str, session: dict[str, Any]) -> None:
        self._set_block_tokens(where, COMPACT_BLOCK_TOKENS)
        shared = _count(where, "shared_blocks", session["shared_blocks"])
        name = session.get("shared_id")
        if not isinstance(name, (str, int)):
            _fail(where, "shared_id", name, "give the name of the shared text")
        self.sessions.begin()
        lengths: dict[int, int] = {}
        last = 0.0
        for number, request in enumerate(session["requests"]):
            here = f"{where} requests[{number}]"
            if not isinstance(request, list) or len(request) != 9:
                _fail(here, "the request", request, f"write {COMPACT_REQUEST}")
            time = _seconds(here, "t", request[0])
            if time < last:
                _fail(here, "t", time, f"give at least {last}, the t of the request before it")
            last = time
            stream = _count(here, "stream", request[1])
            tokens = _count(here, "input tokens", request[2])
            blocks = _count(here, "prompt blocks", request[4])
            most = min(blocks, lengths.get(stream, 0))
            common = _count(here, "common blocks", request[5])
            if common > most:
                _fail(here, "common blocks", common, f"give at most {most}")
            head: list[int] = []
            if stream == 0 and stream not in lengths:
                head = self._shared_blocks(name, shared)[:blocks]
            lengths[stream] = blocks
            new = (*head, *self._new(blocks - common - len(head)))
            duration = _seconds(here, "API seconds", request[7])
            self.sessions.add(time, stream, duration, tokens, common, new)

    # ---- weka

    def _read_weka(self, where: str, session: dict[str, Any]) -> None:
        block_tokens = _count(where, "block_size", session.get("block_size"), 1)
        self._set_block_tokens(where, block_tokens)
        scope = session.get("hash_id_scope")
        if scope not in SCOPES:
            _fail(where, "hash_id_scope", scope, f"possible: {', '.join(SCOPES)}")
        requests = sorted(
            _weka_requests(where, session["requests"], block_tokens, count(1)), key=lambda r: r.time
        )
        known = self._global if scope == "global" else {}
        if scope == "local":
            self._adopt_shared(where, session, block_tokens, requests, known)
        self.sessions.begin()
        before: dict[int, tuple[list[int], list[int]]] = {}  # by stream: ids of the file, and our blocks
        for request in requests:
            ids, blocks = before.get(request.stream, ([], []))
            common = common_length(ids, request.ids)
            new = self._blocks_of(request.ids[common:], blocks[common - 1] if common else -1, known)
            before[request.stream] = request.ids, blocks[:common] + new
            self.sessions.add(request.time, request.stream, request.duration, request.tokens, common, new)

    def _blocks_of(self, ids: list[int], parent: int, known: dict[tuple[int, int], int]) -> list[int]:
        """Numbers the blocks by their whole prefix, whether or not the ids of the file cover it."""
        blocks = []
        for block_id in ids:
            block = known.get((parent, block_id))
            if block is None:
                block = known[parent, block_id] = self._new(1)[0]
            blocks.append(block)
            parent = block
        return blocks

    def _adopt_shared(
        self,
        where: str,
        session: dict[str, Any],
        block_tokens: int,
        requests: list[_Request],
        known: dict[tuple[int, int], int],
    ) -> None:
        """Shares the tool and system text of the agent with the sessions that have as many tokens of both."""
        tools = _count(where, "tool_tokens", session.get("tool_tokens", 0))
        system = _count(where, "system_tokens", session.get("system_tokens", 0))
        first = next((request for request in requests if request.stream == 0), None)
        if first is None:
            return
        parent = -1
        for block_id, block in zip(
            first.ids, self._shared_blocks((tools, system), (tools + system) // block_tokens), strict=False
        ):
            known[parent, block_id] = parent = block


def _weka_requests(
    where: str, requests: object, block_tokens: int, numbers: Iterator[int], stream: int = 0, begin: float = 0
) -> Iterator[_Request]:
    """``numbers``: of the next streams. ``begin``: when a sub-agent was started."""
    if not isinstance(requests, list):
        _fail(where, "requests", requests, "give a list")
    shift = 0.0
    for number, request in enumerate(requests):
        here = f"{where} requests[{number}]"
        if not isinstance(request, dict):
            _fail(here, "the request", request, f"write {WEKA_REQUEST}")
        time = _seconds(here, "t", request.get("t"))
        if number == 0 and time < begin:
            shift = begin  # the times of this sub-agent are relative to its start
        time += shift
        kind = request.get("type")
        if kind == "subagent":
            yield from _weka_requests(
                here, request.get("requests"), block_tokens, numbers, next(numbers), time
            )
        elif kind in KINDS:
            yield _weka_request(here, request, block_tokens, time, stream)
        else:
            _fail(here, "type", kind, f"possible: {', '.join(KINDS)}")


def _weka_request(
    where: str, request: dict[str, Any], block_tokens: int, time: float, stream: int
) -> _Request:
    tokens = _count(where, "in", request.get("in"))
    ids = request.get("hash_ids", [])
    if not isinstance(ids, list) or not set(map(type, ids)) <= {int}:
        _fail(where, "hash_ids", ids, "give a list of integers")
    duration = request.get("api_time")
    return _Request(
        time=time,
        stream=stream,
        duration=0.0 if duration is None else _seconds(where, "api_time", duration),
        tokens=tokens,
        ids=ids[: tokens // block_tokens],  # complete blocks
    )


def common_length(one: list[int], other: list[int]) -> int:
    """Returns the length of the longest common prefix."""
    least, most = 0, min(len(one), len(other))
    while least < most:
        middle = (least + most + 1) // 2
        if one[least:middle] == other[least:middle]:
            least = middle
        else:
            most = middle - 1
    return least
