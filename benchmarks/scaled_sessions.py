# SPDX-License-Identifier: Apache-2.0
"""Recorded agent sessions, scaled down to a small model, in the trace format of aiperf ("weka").

Only the agent itself is replayed, not its sub-agents, and only its first turns. Each turn keeps the recorded
share of its prompt that is the same as in the previous turn, and the recorded pause before the next turn.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kv_offload.replay.formats import COMPACT_BLOCK_TOKENS, read_sessions

MODEL = "tiny"
AGENT = 0  # the stream of the agent itself


@dataclass(frozen=True)
class Scale:
    """How much smaller the sessions become."""

    blocks: float = 24  # divisor of prompts and answers
    seconds: float = 4  # divisor of pauses and API times
    turns: int = 6
    max_pause: float = 8  # seconds, scaled
    max_prompt: int = 4096  # tokens, scaled: sessions with longer prompts are left out


@dataclass(frozen=True)
class Turn:
    """One request. ``ids``: blocks of its prompt, unique in the session. ``pause``: seconds before it."""

    ids: tuple[int, ...]
    answer: int  # tokens
    pause: float
    duration: float  # recorded API time, scaled


@dataclass(frozen=True)
class Session:
    name: str
    turns: tuple[Turn, ...]

    def hint(self, turn: int) -> dict[str, Any]:
        """Returns the hint of a turn, an action of docs/hints.md: when the session continues, or its end."""
        if turn + 1 == len(self.turns):
            return {"type": "release"}
        return {"type": "resume_in", "seconds": self.turns[turn + 1].pause}


def is_usable(recorded: dict[str, Any], scale: Scale) -> bool:
    """True if the agent has enough turns, and no prompt of them is too long."""
    requests = [request for request in recorded["requests"] if request[1] == AGENT][: scale.turns]
    most = scale.max_prompt // COMPACT_BLOCK_TOKENS
    return len(requests) == scale.turns and max(request[4] for request in requests) / scale.blocks <= most


def scale_down(recorded: dict[str, Any], name: str, scale: Scale) -> Session:
    """Converts a session of the compact format. Raises ValueError if the agent has too few turns."""
    requests = [request for request in recorded["requests"] if request[1] == AGENT][: scale.turns]
    if len(requests) < scale.turns:
        raise ValueError(f"session {name} has {len(requests)} turns, not {scale.turns}")
    turns = list[Turn]()
    ids, used, blocks_before, idle_since = list[int](), 0, 0, 0.0
    for begin, _, _, answer, blocks, common, _, api_seconds, _ in requests:
        kept = max(0, len(ids) - int((blocks_before - common) / scale.blocks))
        new = max(1, int((blocks - common) / scale.blocks))  # every turn adds text
        ids = [*ids[:kept], *range(used + 1, used + new + 1)]
        used += new
        pause = min(max(0.0, begin - idle_since) / scale.seconds, scale.max_pause) if turns else 0.0
        turns.append(Turn(tuple(ids), max(2, int(answer / scale.blocks)), pause, api_seconds / scale.seconds))
        blocks_before, idle_since = blocks, begin + api_seconds
    return Session(name, tuple(turns))


def choose(recorded: Sequence[dict[str, Any]], count: int, number: int, scale: Scale) -> list[Session]:
    """Returns ``count`` sessions for round ``number``; each round has different ones.

    The first answers of a round have different lengths: the proxy identifies the sessions by them.
    """
    usable = [one for one in recorded if is_usable(one, scale)]
    first = number * count
    if first + count > len(usable):
        raise ValueError(
            f"{len(usable)} sessions have {scale.turns} turns with at most {scale.max_prompt} tokens; "
            f"round {number} needs {first + count}: give fewer rounds, sessions or turns, or a larger scale"
        )
    sessions, lengths = list[Session](), set[int]()
    for place, one in enumerate(usable[first : first + count]):
        session = scale_down(one, f"round{number}-{place:02}", scale)
        begin, *others = session.turns
        answer = begin.answer
        while answer in lengths:
            answer += 1
        lengths.add(answer)
        changed = Turn(begin.ids, answer, begin.pause, begin.duration)
        sessions.append(Session(session.name, (changed, *others)))
    return sessions


def as_weka(session: Session) -> dict[str, Any]:
    """Returns the session as aiperf reads it. Its clock is the recorded one, scaled."""
    requests, clock = list[dict[str, Any]](), 0.0
    for turn in session.turns:
        clock += turn.pause
        requests.append(
            {
                "t": round(clock, 6),
                "type": "s",
                "model": MODEL,
                "in": len(turn.ids) * COMPACT_BLOCK_TOKENS,
                "out": turn.answer,
                "hash_ids": list(turn.ids),
                "api_time": turn.duration,
            }
        )
        clock += turn.duration
    # aiperf gives each session its own text, so none of it is declared as shared.
    head = {"id": session.name, "models": [MODEL], "block_size": COMPACT_BLOCK_TOKENS}
    return {**head, "hash_id_scope": "local", "requests": requests}


def write_weka(sessions: Sequence[Session], directory: Path) -> Path:
    """Writes one file per session, which aiperf reads in the order of their names."""
    directory.mkdir(parents=True)
    for session in sessions:
        (directory / f"{session.name}.json").write_text(json.dumps(as_weka(session)) + "\n")
    return directory


def needed_tokens(directory: Path, active: int, max_pause: float, chunk_tokens: int) -> float:
    """Returns the tokens in the prompts of the active sessions, averaged over the requests."""
    chunk_blocks = chunk_tokens // COMPACT_BLOCK_TOKENS
    trace = read_sessions(directory).merge(active=active, max_gap=max_pause, chunk_blocks=chunk_blocks)
    return trace.needed * chunk_tokens
