# SPDX-License-Identifier: Apache-2.0
"""A proxy in front of a server that adds hints to the requests of known sessions.

aiperf cannot send different hints with each turn. The proxy knows the sessions that aiperf replays, finds the
turn of each request, and adds its hint. The other systems have the same proxy, without hints, so that it
costs all of them the same.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from aiohttp import ClientSession, ClientTimeout, TCPConnector, web
from scaled_sessions import Session

SESSION_HEADER = "X-Correlation-ID"  # of aiperf: the same in all turns of a session
LENGTH_FIELDS = ("max_completion_tokens", "max_tokens")
PATH = "/v1/chat/completions"


class UnknownTurn(ValueError):
    """The request does not match the next turn of an expected session."""


@dataclass
class Turns:
    """Finds the session and the turn of each request, by its session header and the length of its answer.

    The first answers of the sessions have different lengths.
    """

    sessions: Sequence[Session]
    _places: dict[str, tuple[Session, int]] = field(default_factory=dict)
    _begun: set[str] = field(default_factory=set)

    def find(self, name: str, answer: int) -> tuple[Session, int]:
        """Returns (session, number of the turn). Raises UnknownTurn if it is not the next one."""
        if name in self._places:
            session, last = self._places[name]
            turn = last + 1
            if turn == len(session.turns):
                raise UnknownTurn(f"{session.name} has {turn} turns; there is one more")
        else:
            found = [one for one in self.sessions if one.turns[0].answer == answer]
            if len(found) != 1 or found[0].name in self._begun:
                raise UnknownTurn(f"no session begins with an answer of {answer} tokens now")
            session, turn = found[0], 0
            self._begun.add(session.name)
        if session.turns[turn].answer != answer:
            expected = session.turns[turn].answer
            raise UnknownTurn(f"turn {turn} of {session.name} has {expected} tokens, not {answer}")
        self._places[name] = session, turn
        return session, turn

    @property
    def left(self) -> int:
        """The number of turns that have not been requested."""
        return sum(len(one.turns) for one in self.sessions) - sum(
            turn + 1 for _, turn in self._places.values()
        )


def answer_length(body: dict[str, Any]) -> int:
    """Returns the requested length of the answer in tokens. Raises UnknownTurn without one."""
    for name in LENGTH_FIELDS:
        if body.get(name) is not None:
            return int(body[name])
    raise UnknownTurn(f"the request has none of {', '.join(LENGTH_FIELDS)}")


class LoopThread:
    """An event loop in a separate thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, None], timeout: float = 30) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class HintProxy:
    """Forwards requests, in a separate thread. ``failures`` lists the errors since the last ``expect``."""

    def __init__(self, server_port: int, hints: bool) -> None:
        self._url, self.hints = f"http://127.0.0.1:{server_port}", hints
        self._turns = Turns(())
        self.failures = list[str]()
        self.port = 0

    def expect(self, sessions: Sequence[Session]) -> None:
        """Sets the sessions that are replayed next, once each."""
        self._turns, self.failures = Turns(sessions), []

    @property
    def left(self) -> int:
        """The number of turns that have not been requested."""
        return self._turns.left

    def __enter__(self) -> Self:
        self._loop = LoopThread()
        self._loop.call(self._start())
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call(self._stop())
        self._loop.close()

    async def _start(self) -> None:
        self._client = ClientSession(timeout=ClientTimeout(total=None), connector=TCPConnector(limit=0))
        application = web.Application(client_max_size=64 * 1024**2)
        application.router.add_post(PATH, self._forward)
        self._runner = web.AppRunner(application)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def _stop(self) -> None:
        await self._runner.cleanup()
        await self._client.close()

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        name = request.headers.get(SESSION_HEADER, "")
        try:
            session, turn = self._turns.find(name, answer_length(body))
        except UnknownTurn as error:
            self.failures.append(str(error))
            return web.json_response({"error": {"message": str(error)}}, status=400)
        if self.hints:
            hints = {"version": 1, "session": name, "actions": [session.hint(turn)]}
            body["kv_transfer_params"] = {"kv_offload_hints": hints}
        async with self._client.post(self._url + PATH, json=body) as reply:
            answer = web.StreamResponse(status=reply.status)
            answer.content_type = reply.content_type
            await answer.prepare(request)
            said = b""
            async for piece in reply.content.iter_any():
                await answer.write(piece)
                said = (said + piece)[:300] if reply.status != 200 else b""
            if reply.status != 200:
                self.failures.append(f"{reply.status}: {said.decode(errors='replace')}")
            await answer.write_eof()
        return answer
