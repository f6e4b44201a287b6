# SPDX-License-Identifier: Apache-2.0
"""The hints of a request about sessions: their schema, version 1.

A request carries them in its ``kv_transfer_params``::

    {"kv_offload_hints": {"version": 1, "session": "4f1d",
                          "actions": [{"type": "resume_in", "seconds": 20}]}}

vLLM also passes a ``KvHintsEnvelope`` from ``generate(kv_hints=...)``; ``document_of`` converts it.

Any client may send hints, so invalid ones never fail a request: each is rejected with a reason. Importing
this module loads neither the C++ core nor vLLM.
"""

import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

VERSION = 1
KEY = "kv_offload_hints"  # in kv_transfer_params
ENVELOPE_PREFIX = "kv_offload."  # of our action types in vLLM's envelope
MAX_ACTIONS = 16
MAX_KEYS = 16  # of one table
MAX_SECONDS = 7 * 86_400.0  # longer times are clipped
MAX_PIN_SECONDS = 600.0
MAX_BYTES = 2**62

Name = Annotated[str, Field(min_length=1, max_length=128)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Target(_Table):
    """A session that is not the request's own. Its prompts begin with the same chunk as this prompt."""

    session: Name = Field(description="name of the session")
    branch: Name | None = Field(default=None, description="branch of the session")


class Action(_Table):
    """The fields that every action has."""

    id: Annotated[str, Field(max_length=64)] | None = Field(
        default=None, description="returned with the outcome"
    )
    action_version: Literal["1"] = Field(
        default="1", description="version of the action's fields, for vLLM's envelope"
    )
    target: Target | None = Field(
        default=None, description="the session that the hint is about. Default: the prompt of this request"
    )


class ResumeIn(Action):
    """The session continues after this time, for example when a tool call ends."""

    type: Literal["resume_in"]
    seconds: FiniteFloat = Field(
        ge=0, description="expected time until the next request, from when the hint takes effect"
    )


class ResumeAt(Action):
    """The session continues at this time."""

    type: Literal["resume_at"]
    time: FiniteFloat = Field(ge=0, description="unix time in seconds")


class Prefetch(Action):
    """The session continues soon: read its newest prompt from the tiers into host memory now."""

    type: Literal["prefetch"]


class Release(Action):
    """The session or branch has ended. A branch keeps what it shares with its session."""

    type: Literal["release"]


class Supersede(Action):
    """This prompt replaces the newest prompt of the session or of the target, for example after a compaction:
    chunks of the earlier prompt that are not in this one are no longer needed."""

    type: Literal["supersede"]


class Retain(Action):
    """Evict the prompt after all others until the time is over or the session continues."""

    type: Literal["retain"]
    seconds: FiniteFloat = Field(gt=0, description="how long at most")


class Pin(Action):
    """Do not evict the beginning of the prompt until the time is over. The server limits bytes and time."""

    type: Literal["pin"]
    seconds: FiniteFloat = Field(gt=0, description="how long, at most 600 s")
    bytes: int | None = Field(
        default=None, gt=0, description="host memory to use at most. Default: as much as the server allows"
    )


ACTIONS: tuple[type[Action], ...] = (ResumeIn, ResumeAt, Prefetch, Release, Supersede, Retain, Pin)


def type_of(action: type[Action]) -> str:
    """Returns the value of ``type`` of an action."""
    (name,) = action.model_fields["type"].annotation.__args__  # type: ignore[union-attr]
    return str(name)


_BY_TYPE = {type_of(action): action for action in ACTIONS}
ACTION_TYPES = tuple(_BY_TYPE)


class Envelope(_Table):
    """The value of ``kv_offload_hints``."""

    version: Literal[1] = Field(description="version of this schema")
    client: Name | None = Field(
        default=None,
        description="name of the client, set by a gateway. Session names of different clients are unrelated, "
        "and limits apply to each client",
    )
    session: Name | None = Field(
        default=None, description="name of the session that this request is a turn of, such as a UUID"
    )
    branch: Name | None = Field(
        default=None, description="branch of the session, such as the name of a sub-agent"
    )
    actions: Any = Field(default=(), description=f"list of the hints, at most {MAX_ACTIONS}")


@dataclass(frozen=True)
class Outcome:
    """The outcome of one hint: accepted, clipped, rejected, missing; pending until the request ends."""

    type: str  # one of ACTION_TYPES, or "unknown"
    outcome: str
    id: str | None = None
    reason: str = ""

    def as_dict(self) -> dict[str, str]:
        fields = {"type": self.type, "id": self.id, "outcome": self.outcome, "reason": self.reason}
        return {name: value for name, value in fields.items() if value}


@dataclass
class Hints:
    """The hints of one request. ``rejected``: those that are invalid; ``unread``: how many were not read."""

    client: str = ""
    session: str | None = None
    branch: str | None = None
    actions: list[Action] = field(default_factory=list)
    rejected: list[Outcome] = field(default_factory=list)
    unread: int = 0


def parse(document: Any) -> Hints:
    """Returns the hints in the value of ``kv_offload_hints``. Never raises for any JSON value."""
    try:
        if isinstance(document, dict) and len(document) > MAX_KEYS:
            return Hints(rejected=[_rejected(f"has {len(document)} keys; at most {MAX_KEYS} are possible")])
        envelope = Envelope.model_validate(document)
    except ValidationError as error:
        return Hints(rejected=[_rejected(_reason(error))])
    if envelope.branch is not None and envelope.session is None:
        return Hints(rejected=[_rejected("branch: needs a session")])
    if not isinstance(envelope.actions, (list, tuple)):
        return Hints(rejected=[_rejected(f"actions is {shown(envelope.actions)}; it must be a list")])
    hints = Hints(envelope.client or "", envelope.session, envelope.branch)
    for action in envelope.actions[:MAX_ACTIONS]:
        _parse_action(action, hints)
    hints.unread = max(0, len(envelope.actions) - MAX_ACTIONS)
    return hints


def _parse_action(action: Any, hints: Hints) -> None:
    if not isinstance(action, dict):
        hints.rejected.append(_rejected(f"an action is {shown(action)}; it must be a table"))
        return
    name = action.get("type")
    given = action.get("id")
    made_id = given if isinstance(given, str) and len(given) <= 64 and _is_unicode(given) else None
    kind = _BY_TYPE.get(name) if isinstance(name, str) else None
    if kind is None:
        reason = f"type is {shown(name)}; possible: {', '.join(ACTION_TYPES)}"
        hints.rejected.append(_rejected(reason, id=made_id))
    elif len(action) > MAX_KEYS:
        reason = f"has {len(action)} keys; at most {MAX_KEYS} are possible"
        hints.rejected.append(_rejected(reason, str(name), made_id))
    else:
        try:
            hints.actions.append(kind.model_validate(action))
        except ValidationError as error:
            hints.rejected.append(_rejected(_reason(error), str(name), made_id))


def _is_unicode(text: str) -> bool:
    """False for text with a lone surrogate, which no report can encode."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _rejected(reason: str, type: str = "unknown", id: str | None = None) -> Outcome:
    return Outcome(type, "rejected", id, reason)


def _reason(error: ValidationError) -> str:
    """Returns one sentence per wrong field."""
    sentences = []
    for detail in error.errors(include_url=False, include_context=False):
        where = ".".join(shown(part) if len(str(part)) > 40 else str(part) for part in detail["loc"])
        if detail["type"] == "missing":
            sentences.append(f"{where} is required")
        elif detail["type"] == "extra_forbidden":
            sentences.append(f"{shown(where)} is not known")
        else:
            message = "it must be a table"
            if detail["type"] != "model_type":
                message = detail["msg"].replace("Input should", "it should").replace("String", "it")
            sentences.append(f"{where or 'the value'} is {shown(detail['input'])}; {message}")
    return "; ".join(sentences)


class _Short(reprlib.Repr):
    """Formats the beginning of any value, in a time that does not depend on its size."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 2
        self.maxlist = self.maxtuple = self.maxdict = 3
        self.maxstring = self.maxother = self.maxlong = 60

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if x.bit_length() < 128 else f"an integer of {x.bit_length()} bits"


_SHORT = _Short()


def shown(value: object) -> str:
    """Returns ``value`` for a message: one line of bounded length."""
    return _SHORT.repr(value).encode("ascii", "backslashreplace").decode()[:160]


def document_of(envelope: Any) -> dict[str, Any] | None:
    """Returns our actions in a ``KvHintsEnvelope`` of vLLM as a value for ``parse``; None without any.

    The type of our actions begins with ``kv_offload.``; their version is "1"; the payload has the fields of
    the action. ``kv_offload.session`` names the request's session: its payload has session, branch and
    client. Actions of other types are for other components.
    """
    document: dict[str, Any] = {"version": VERSION, "actions": []}
    ours = False
    for action in _some(getattr(envelope, "actions", None)):
        name = getattr(action, "action_type", None)
        if not isinstance(name, str) or not name.startswith(ENVELOPE_PREFIX):
            continue
        ours = True
        name = name.removeprefix(ENVELOPE_PREFIX)
        payload = getattr(action, "payload", None)
        fields = _first(payload) if isinstance(payload, dict) else {}
        version = getattr(action, "action_version", None)
        if name == "session" and version == str(VERSION):
            document |= {key: fields[key] for key in ("session", "branch", "client") if key in fields}
        else:
            own = {"type": name, "id": _id_of(action), "action_version": version}
            document["actions"].append(fields | own)
    return document if ours else None


def merged(first: Any, second: Any) -> Any:
    """Returns one document of two: the session of the first, and the actions of both."""
    if not isinstance(first, dict) or not isinstance(second, dict):
        return first if second is None else second
    actions = [*_some(first.get("actions")), *_some(second.get("actions"))]
    return {**second, **first, "actions": actions}


def _some(actions: Any) -> list[Any]:
    return list(actions[: MAX_ACTIONS + 1]) if isinstance(actions, (list, tuple)) else []


def _first(payload: Mapping[str, Any]) -> dict[str, Any]:
    items: Iterable[tuple[str, Any]] = payload.items()
    return dict(item for item, _ in zip(items, range(MAX_KEYS + 1), strict=False))


def _id_of(action: Any) -> str | None:
    given = getattr(action, "action_id", None)
    return given[:64] if isinstance(given, str) else None
