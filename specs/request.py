# SPDX-License-Identifier: Apache-2.0
"""The hints that a request may send in its ``kv_transfer_params``."""

import time
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kv_offload import hints as session_hints
from kv_offload.config import MAX_REMOTE_WAIT_MS, REQUEST_SETTINGS
from kv_offload.hints import Outcome, shown
from kv_offload.log import get_logger

if TYPE_CHECKING:
    from .hints import RequestHints

logger = get_logger(__name__)

LOAD_POLICIES = ("auto", "always", "never")
_LOG_SECONDS = 60.0
# Other connectors and routers read the same dictionary, so each of our keys has our prefix.
_PREFIX = "kv_offload_"
_LOAD_POLICY, _PRIORITY = "kv_offload_load_policy", "kv_offload_priority"
_SKIP_LOAD, _SKIP_STORE, _REMOTE_WAIT = (
    "kv_offload_skip_load",
    "kv_offload_skip_store",
    "kv_offload_remote_wait_ms",
)
_HINTS = (_LOAD_POLICY, _PRIORITY, _SKIP_LOAD, _SKIP_STORE, _REMOTE_WAIT, session_hints.KEY)


@dataclass(slots=True)
class RequestState:
    """State of one request. Stored in the ReqContext, because request IDs may be reused."""

    handle: int  # the request's handle in TieredCache
    epoch: int  # the manager's epoch (its number of resets) when the request was last looked up
    started: bool = False  # vLLM has scheduled it as new
    pending: set[bytes] = field(
        default_factory=set
    )  # keys of pending hits, if vLLM tracks their event payloads
    hints: "RequestHints | None" = None
    request: Any = None  # vLLM's Request, if requests are traced and vLLM handed it over
    until_stopped: bytes | None = None  # the report of a traced session, when its caching was stopped
    tenant: int = 0  # its number in TenantTable


class HintReader:
    """Reads the hints of requests.

    Any client may send hints, so an invalid hint is not an error: it is ignored and logged, at most once a
    minute.
    """

    def __init__(
        self,
        *,
        allowed: Set[str] = frozenset(REQUEST_SETTINGS),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``allowed``: those of REQUEST_SETTINGS that are not ignored (the setting ``request_hints``)."""
        self._allowed = allowed
        self._barred = frozenset(_PREFIX + name for name in REQUEST_SETTINGS if name not in allowed)
        self._clock = clock
        self._next_line = 0.0
        self._suppressed = 0

    def read(self, params: Any) -> dict[str, Any]:
        """Returns arguments for ``TieredCache.begin_request``.

        ``kv_offload_load_policy``: auto, always, never; ``kv_offload_skip_load``, ``kv_offload_skip_store``:
        bool; ``kv_offload_priority``: int, below 0: the request's chunks are evicted first, above 0: last;
        ``kv_offload_remote_wait_ms``: int, how long to wait for chunks that no tier has yet.
        """
        if not self._allowed or not isinstance(params, dict):
            return {}
        if not self._barred.isdisjoint(params):
            params = {name: value for name, value in params.items() if name not in self._barred}
        hints: dict[str, Any] = {}
        policy = params.get(_LOAD_POLICY)
        if isinstance(policy, str) and policy in LOAD_POLICIES:
            hints["load_policy"] = policy
        elif policy is not None:
            self._ignored(_LOAD_POLICY, policy, "auto, always, never")
        if self._flag(params, _SKIP_STORE):
            hints["skip_store"] = True
        if self._flag(params, _SKIP_LOAD):
            hints |= {"load_from_cpu": False, "load_tiers": 0}
        priority = params.get(_PRIORITY)
        if type(priority) is int:  # True is an int too, and no priority
            hints["priority"] = max(-1, min(1, priority))
        elif priority is not None:
            self._ignored(_PRIORITY, priority, "an integer")
        wait = params.get(_REMOTE_WAIT)
        if type(wait) is int and wait >= 0:
            hints["remote_wait_seconds"] = min(wait, MAX_REMOTE_WAIT_MS) / 1000
        elif wait is not None:
            self._ignored(_REMOTE_WAIT, wait, "an integer from 0")
        for name in params:
            if isinstance(name, str) and name.startswith(_PREFIX) and name not in _HINTS:
                known = ", ".join(_HINTS)
                self._log_limited(
                    "kv_transfer_params: %s is not known and is ignored; possible: %s", shown(name), known
                )
        return hints

    def _flag(self, params: dict[str, Any], name: str) -> bool:
        value = params.get(name)
        if value is not None and not isinstance(value, bool):
            self._ignored(name, value, "true, false")
        return value is True

    def log_rejected(self, outcome: Outcome) -> None:
        """Logs a hint about a session that was rejected."""
        self._log_limited(
            "kv_transfer_params: a hint of type %s is rejected: %s", outcome.type, outcome.reason
        )

    def _ignored(self, name: str, value: object, possible: str) -> None:
        self._log_limited(
            "kv_transfer_params: %s is %s and is ignored; possible: %s", name, shown(value), possible
        )

    def _log_limited(self, text: str, *parts: object) -> None:
        now = self._clock()
        if now < self._next_line:
            self._suppressed += 1
            return
        more = f" ({self._suppressed} others since the last such line)" if self._suppressed else ""
        logger.warning(text + "%s", *parts, more)
        self._next_line, self._suppressed = now + _LOG_SECONDS, 0
