# SPDX-License-Identifier: Apache-2.0
"""Executes the hints of requests about sessions.

``kv_offload.hints`` has their schema; csrc/cache/sessions.h describes the execution in the core.
"""

import math
import os
import time
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from kv_offload import hints as schema
from kv_offload.hints import Action, Hints, Outcome

if TYPE_CHECKING:
    from kv_offload._core import TieredCache

METRIC = "kv_offload_hints_total"
PENDING = "pending"
NO_SESSION = b""
# (type, target session, session that a released branch belongs to, seconds, bytes): the core's hint
Order = tuple[str, bytes, bytes, float, int]

_REASONS = {
    "missing": "the target is not known, or has no chunk of its own in host memory",
    "clipped": "pinned the beginning of the prompt, which reaches the limit of bytes",
    "rejected": "the hints of this request name too many chunks",
}
_NOT_TRUSTED = "this client's earlier hints did not predict which session returns sooner"
_RETURNS = (schema.ResumeIn, schema.ResumeAt, schema.Prefetch)  # the session is expected back
_PIN_REJECTED = "over the limit of pinned bytes, or of chunks per request"


@dataclass(slots=True)
class RequestHints:
    """The hints of one live request and their outcomes so far."""

    given: Hints
    outcomes: list[Outcome] = field(default_factory=list)
    own: list[Action] = field(default_factory=list)  # about this prompt, until they are executed
    others: list[Action] = field(default_factory=list)  # about other sessions
    family: int = 0
    client: int = 0  # digest of the client's name
    returns_in: float = 0.0  # seconds until the session's next request; inf: none; 0: unknown


class HintExecutor:
    """Reads the hints of requests and executes the allowed ones. Single-threaded, like the manager.

    Hints are executed when the request ends, because its own use of a chunk ends what was expected of it.
    Names never reach the core: it gets digests with a key of this process.
    """

    def __init__(
        self,
        cache: "TieredCache",
        count: Callable[[str, str, int], None],
        allowed: Set[str] = frozenset(schema.ACTION_TYPES),
        log_rejected: Callable[[Outcome], None] = lambda outcome: None,
        wall_clock: Callable[[], float] = time.time,
        key: bytes | None = None,
    ) -> None:
        """``count(type, outcome, number)`` counts outcomes. ``allowed``: types that requests may send."""
        self._cache = cache
        self._count = count
        self._allowed = allowed
        self._log_rejected = log_rejected
        self._wall_clock = wall_clock
        self._key = os.urandom(16) if key is None else key

    def read(self, params: Any, envelope: Any, client: str = "") -> RequestHints | None:
        """Returns the hints of a request; None if it has none, or if none are allowed.

        ``client``: of hints that name none.
        """
        document = params.get(schema.KEY) if isinstance(params, dict) else None
        if envelope is not None:
            document = schema.merged(document, schema.document_of(envelope))
        if document is None or not self._allowed:
            return None
        hints = RequestHints(schema.parse(document))
        given = hints.given
        given.client = given.client or client
        for rejected in given.rejected:
            self._record(hints, rejected)
        if given.unread:
            self._count("unknown", "rejected", given.unread)
            hints.outcomes.append(
                Outcome("unknown", "rejected", None, f"{given.unread} hints more than {schema.MAX_ACTIONS}")
            )
        for action in given.actions:
            self._accept(hints, action)
        hints.family = self._family(hints)
        hints.client = int.from_bytes(self._digest(8, given.client), "big")
        hints.returns_in = self._returns_in(hints)
        return hints

    def _returns_in(self, hints: RequestHints) -> float:
        """Returns what the request's own hints say about its return. The end of the request sets it again."""
        for action in reversed(hints.own):
            if isinstance(action, schema.Release):
                # What a branch shares with its session stays; only the core knows which chunks these are.
                return 0.0 if hints.given.branch else math.inf
            if isinstance(action, (schema.ResumeIn, schema.ResumeAt)):
                seconds = self._seconds_until(action)
                return min(max(seconds, 0.0), schema.MAX_SECONDS)
        return 0.0

    def _seconds_until(self, action: schema.ResumeIn | schema.ResumeAt) -> float:
        if isinstance(action, schema.ResumeAt):
            return action.time - self._wall_clock()
        return action.seconds

    def _family(self, hints: RequestHints) -> int:
        """Returns the family of sessions that the request belongs to, as a number; 0: none."""
        given = hints.given
        session = given.session
        if session is None and hints.own:
            session = os.urandom(16).hex()  # the hints apply to the chunks that only this request uses
        if session is None and hints.others:
            target = hints.others[0].target
            assert target is not None
            session = target.session  # the request uses chunks of that session on its behalf
        if session is None:
            return 0
        return int.from_bytes(self._digest(4, given.client, session), "big") or 1

    def _accept(self, hints: RequestHints, action: Action) -> None:
        given, target = hints.given, action.target
        name = schema.type_of(type(action))
        supersedes = isinstance(action, schema.Supersede)
        needs_session = isinstance(action, (schema.Supersede, schema.Retain, schema.Pin))
        is_own = target is None or (target.session, target.branch) == (given.session, given.branch)
        if name not in self._allowed:
            self._record(
                hints, Outcome(name, "rejected", action.id, "request_hints does not allow this type")
            )
        elif needs_session and is_own and given.session is None:
            self._record(hints, Outcome(name, "rejected", action.id, "needs a session"))
        else:
            (hints.own if is_own or supersedes else hints.others).append(action)

    def finish(self, hints: RequestHints, root: bytes | None, handle: int) -> None:
        """Executes the hints of a request that ends; call it before the core ends the request.

        ``root``: key of the first chunk of the prompt.
        """
        others, hints.others = hints.others, []
        if others:
            self._execute(hints, others, root, self._cache.apply_hints)
        given = hints.given
        session = self._session(given, given.session, given.branch, root)
        actions, hints.own = hints.own, []
        if session or actions:
            self._execute(
                hints,
                actions,
                root,
                lambda orders: self._cache.end_turn(handle, session, hints.client, orders),
            )

    def report(self, hints: RequestHints) -> list[dict[str, str]]:
        """Returns the outcomes for the request's report."""
        pending = [
            Outcome(schema.type_of(type(action)), PENDING, action.id)
            for action in (*hints.others, *hints.own)
        ]
        return [outcome.as_dict() for outcome in (*hints.outcomes, *pending)]

    def _execute(
        self,
        hints: RequestHints,
        actions: list[Action],
        root: bytes | None,
        call: Callable[[list[Order]], list[str]],
    ) -> None:
        orders: list[Order] = []
        clipped: list[str] = []
        executed: list[Action] = []
        for action in actions:
            if root is None:
                reason = "this prompt has no whole chunk"
                self._record(hints, Outcome(schema.type_of(type(action)), "missing", action.id, reason))
                continue
            order, reason = self._order(hints.given, action, root)
            orders.append(order)
            clipped.append(reason)
            executed.append(action)
        for action, reason, outcome in zip(executed, clipped, call(orders), strict=True):
            if outcome == "accepted" and reason:
                outcome = "clipped"
            else:
                reason = _REASONS.get(outcome, reason)
                if outcome == "rejected" and isinstance(action, schema.Pin):
                    reason = _PIN_REJECTED
                elif outcome == "rejected" and isinstance(action, _RETURNS):
                    reason = _NOT_TRUSTED
            self._record(hints, Outcome(schema.type_of(type(action)), outcome, action.id, reason))

    def _order(self, given: Hints, action: Action, root: bytes | None) -> tuple[Order, str]:
        """Returns the core's hint, and the reason if its amount was clipped."""
        target = trunk = NO_SESSION
        session, branch = given.session, given.branch
        if action.target is not None:
            session, branch = action.target.session, action.target.branch
            target = self._session(given, session, branch, root)
        if isinstance(action, schema.Release):
            if branch is not None:
                trunk = self._session(given, session, None, root)
            return ("release", target, trunk, 0.0, 0), ""
        if isinstance(action, (schema.Supersede, schema.Prefetch)):
            return (schema.type_of(type(action)), target, trunk, 0.0, 0), ""
        name, most, size = "resume", schema.MAX_SECONDS, 0
        if isinstance(action, (schema.Retain, schema.Pin)):
            seconds = action.seconds
        else:
            assert isinstance(action, (schema.ResumeIn, schema.ResumeAt))
            seconds = self._seconds_until(action)
        if isinstance(action, schema.Retain):
            name = "retain"
        elif isinstance(action, schema.Pin):
            name, most, size = "pin", schema.MAX_PIN_SECONDS, min(action.bytes or 0, schema.MAX_BYTES)
        allowed = min(max(seconds, 0.0), most)
        reason = "" if allowed == seconds else f"{allowed:g} s instead of {seconds:g} s"
        return (name, target, trunk, allowed, size), reason

    def _session(self, given: Hints, session: str | None, branch: str | None, root: bytes | None) -> bytes:
        if session is None or root is None:
            return NO_SESSION
        return self._digest(16, given.client, session, branch or "", root)

    def _digest(self, size: int, *parts: str | bytes) -> bytes:
        digest = blake2b(digest_size=size, key=self._key)
        for part in parts:
            data = part.encode() if isinstance(part, str) else part
            digest.update(len(data).to_bytes(4, "big"))
            digest.update(data)
        return digest.digest()

    def _record(self, hints: RequestHints, outcome: Outcome) -> None:
        hints.outcomes.append(outcome)
        self._count(outcome.type, outcome.outcome, 1)
        if outcome.outcome == "rejected":
            self._log_rejected(outcome)
