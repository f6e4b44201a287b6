# SPDX-License-Identifier: Apache-2.0
"""The schema of hints about sessions: what clients may send, and that nothing they send is an error."""

import json
import math
import random
from types import SimpleNamespace
from typing import Any

import pytest

from kv_offload import hints
from kv_offload.hints import MAX_ACTIONS, MAX_KEYS, Hints, document_of, merged, parse, shown

RESUME = {"type": "resume_in", "seconds": 20}


def document(*actions: Any, **more: Any) -> dict[str, Any]:
    return {"version": 1, "actions": list(actions), **more}


def only_reason(given: Any) -> str:
    found = parse(given)
    assert found.actions == []
    (outcome,) = found.rejected
    assert outcome.outcome == "rejected"
    return outcome.reason


def test_a_valid_document_is_read() -> None:
    found = parse(
        document(
            RESUME,
            {"type": "resume_at", "time": 1.5e9, "id": "x"},
            {"type": "prefetch"},
            {"type": "release", "target": {"session": "b", "branch": "c"}},
            {"type": "supersede"},
            session="a",
            branch="t",
            client="c",
        )
    )
    assert (found.client, found.session, found.branch, found.rejected) == ("c", "a", "t", [])
    assert [hints.type_of(type(action)) for action in found.actions] == list(hints.ACTION_TYPES[:5])
    assert found.actions[0] == hints.ResumeIn(type="resume_in", seconds=20.0)
    assert found.actions[3].target == hints.Target(session="b", branch="c")


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (None, "the value is None; it must be a table"),
        ([], "the value is []; it must be a table"),
        ({}, "version is required"),
        ({"version": 2}, "version is 2; it should be 1"),
        ({"version": "1"}, "version is '1'; it should be 1"),
        ({"version": 1, "sesion": "a"}, "'sesion' is not known"),
        ({"version": 1, "session": ""}, "session is ''; it should have at least 1 character"),
        ({"version": 1, "session": 7}, "session is 7; it should be a valid string"),
        ({"version": 1, "branch": "a"}, "branch: needs a session"),
        ({"version": 1, "actions": "resume_in"}, "actions is 'resume_in'; it must be a list"),
        ({"version": 1, "actions": {"type": "release"}}, "actions is {'type': 'release'}; it must be a list"),
        (document(7), "an action is 7; it must be a table"),
        (document({}), f"type is None; possible: {', '.join(hints.ACTION_TYPES)}"),
        (document({"type": "fetch"}), f"type is 'fetch'; possible: {', '.join(hints.ACTION_TYPES)}"),
        (document({"type": "resume_in"}), "seconds is required"),
        (document({**RESUME, "seconds": -1}), "seconds is -1; it should be greater than or equal to 0"),
        (document({**RESUME, "seconds": "20"}), "seconds is '20'; it should be a valid number"),
        (document({**RESUME, "seconds": True}), "seconds is True; it should be a valid number"),
        (document({**RESUME, "seconds": math.nan}), "seconds is nan; it should be a finite number"),
        (document({**RESUME, "seconds": math.inf}), "seconds is inf; it should be a finite number"),
        (document({**RESUME, "target": "a"}), "target is 'a'; it must be a table"),
        (document({**RESUME, "target": {}}), "target.session is required"),
        (document({**RESUME, "time": 3}), "'time' is not known"),
        (document({"type": "resume_at", "time": None}), "time is None; it should be a valid number"),
        (document({"type": "release", "id": 3}), "id is 3; it should be a valid string"),
        (document({"type": "retain", "seconds": 0}), "seconds is 0; it should be greater than 0"),
        (document({"type": "pin", "seconds": 1, "bytes": 0}), "bytes is 0; it should be greater than 0"),
        (document({"type": "pin", "seconds": 1, "bytes": 1.5}), "bytes is 1.5; it should be a valid integer"),
    ],
)
def test_a_wrong_field_has_one_clear_reason(given: Any, reason: str) -> None:
    assert only_reason(given) == reason


def test_a_wrong_action_does_not_reject_the_others() -> None:
    found = parse(document({"type": "resume_in"}, RESUME, 3, session="a"))
    assert len(found.actions) == 1
    assert [outcome.type for outcome in found.rejected] == ["resume_in", "unknown"]


def test_only_the_first_actions_are_read() -> None:
    found = parse(document(*[RESUME] * (MAX_ACTIONS + 5)))
    assert (len(found.actions), found.unread) == (MAX_ACTIONS, 5)
    assert parse(document(*[RESUME] * MAX_ACTIONS)).unread == 0


def test_a_table_with_many_keys_is_not_read() -> None:
    many = {f"k{n}": n for n in range(MAX_KEYS)}
    assert "17 keys" in only_reason({"version": 1, **many})
    assert "18 keys" in only_reason(document(RESUME | many))


def test_the_id_of_a_rejected_action_is_returned_if_it_is_short() -> None:
    found = parse(document({"type": "resume_in", "id": "x"}, {"type": "resume_in", "id": "x" * 65}))
    assert [outcome.id for outcome in found.rejected] == ["x", None]


# ---- hostile documents


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


HOSTILE = [
    nested(100_000),
    {"type": nested(50_000)},
    "x" * 10_000_000,
    10**5000,
    -(10**5000),
    float("-inf"),
    {"type": "resume_in", "seconds": 10**400},
    {"type": "resume_in", "seconds": nested(10_000)},
    {"type": "release", "target": {"session": nested(10_000)}},
    {"type": "release", "target": {"session": "x" * 1_000_000}},
    {"type": "release", "target": {"session": "\ud800"}},
    {"type": "release", "id": "\ud800"},
    {"x" * 1_000_000: 1, "type": "release"},
    {"type": "\n\x1b[31m"},
    {1: 2},
    {"type": "release", None: None},
    b"bytes",
    object(),
]


@pytest.mark.parametrize("value", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_values_are_rejected_with_a_short_line(value: Any) -> None:
    for given in (value, document(value), {"version": value}, document(session=value), document(a=value)):
        found = parse(given)
        assert isinstance(found, Hints)
        assert found.actions == []
        assert found.rejected
        for outcome in found.rejected:
            assert len(outcome.reason) < 1000
            assert outcome.reason.isprintable()
            assert outcome.type in (*hints.ACTION_TYPES, "unknown")
            json.dumps(outcome.as_dict(), ensure_ascii=False).encode()


def test_random_documents_never_raise() -> None:
    chance = random.Random(1)
    words = ["type", "session", "seconds", "target", "version", "actions", "id", "time", "branch", "client"]
    words += list(hints.ACTION_TYPES)

    def value(depth: int) -> Any:
        kind = chance.randrange(9 if depth else 6)
        if kind == 0:
            return chance.choice([None, True, False, 0, 1, -1, 20, math.nan, math.inf, 1e308, 10**30])
        if kind < 5:
            return chance.choice(words)
        if kind == 5:
            return chance.random() * 100
        if kind == 6:
            return [value(depth - 1) for _ in range(chance.randrange(4))]
        return {chance.choice(words): value(depth - 1) for _ in range(chance.randrange(6))}

    accepted = 0
    for _ in range(20_000):
        actions = [{"type": chance.choice(hints.ACTION_TYPES), **dict([(chance.choice(words), value(2))])}]
        found = parse(document(*actions, value(3)) if chance.random() < 0.8 else value(4))
        accepted += len(found.actions)
        for action in found.actions:
            for name in ("seconds", "time"):
                number = getattr(action, name, 0.0)
                assert math.isfinite(number)
                assert number >= 0
    assert accepted > 100


# ---- messages


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a\nb", "'a\\nb'"),
        ("é", "'\\xe9'"),
        (2**200, "an integer of 201 bits"),
        ([1, 2, 3, 4], "[1, 2, 3, ...]"),
        ([[[1]]], "[[[...]]]"),
        (1.5, "1.5"),
        ("x" * 1000, "'" + "x" * 27 + "..." + "x" * 28 + "'"),
    ],
)
def test_a_value_is_shown_shortly(value: Any, text: str) -> None:
    assert shown(value) == text


# ---- vLLM's envelope


def action(name: Any, version: Any = "1", payload: Any = None, id: Any = "i") -> Any:
    payload = {} if payload is None else payload
    return SimpleNamespace(action_type=name, action_version=version, payload=payload, action_id=id)


def test_an_envelope_becomes_a_document() -> None:
    envelope = SimpleNamespace(
        actions=[
            action("kv_offload.session", payload={"session": "a", "branch": "b", "client": "c", "x": 1}),
            action("kv.fetch"),
            action("kv_offload.resume_in", payload={"seconds": 3}),
        ]
    )
    found = parse(document_of(envelope))
    assert (found.client, found.session, found.branch, found.rejected) == ("c", "a", "b", [])
    (resume,) = found.actions
    assert (resume.id, resume.seconds) == ("i", 3.0)  # type: ignore[attr-defined]


def test_an_unknown_version_of_an_action_is_rejected() -> None:
    envelope = SimpleNamespace(actions=[action("kv_offload.resume_in", "2", {"seconds": 3})])
    (outcome,) = parse(document_of(envelope)).rejected
    assert (outcome.type, outcome.reason) == ("resume_in", "action_version is '2'; it should be '1'")
    envelope = SimpleNamespace(actions=[action("kv_offload.session", "2", {"session": "a"})])
    assert parse(document_of(envelope)).session is None


@pytest.mark.parametrize(
    "odd",
    [
        SimpleNamespace(),
        SimpleNamespace(actions=None),
        SimpleNamespace(actions=[None, 3, action(7), action("kv.fetch")]),
        SimpleNamespace(actions="kv_offload."),
    ],
    ids=range(4),
)
def test_an_envelope_without_our_actions_is_no_document(odd: Any) -> None:
    assert document_of(odd) is None


def test_hostile_envelopes_are_rejected() -> None:
    for payload in (nested(10_000), {"seconds": nested(10_000)}, {f"k{n}": n for n in range(100_000)}, "x"):
        envelope = SimpleNamespace(actions=[action("kv_offload.resume_in", payload=payload, id="i" * 10_000)])
        (outcome,) = parse(document_of(envelope)).rejected
        assert len(outcome.reason) < 1000


def test_two_documents_have_the_actions_of_both() -> None:
    both = merged(document(RESUME, session="a"), document({"type": "release"}, session="b", client="c"))
    found = parse(both)
    assert (found.session, found.client, len(found.actions)) == ("a", "c", 2)
    assert merged(None, document(RESUME)) == document(RESUME)
    assert merged(document(RESUME), None) == document(RESUME)
    assert merged("x", None) == "x"
