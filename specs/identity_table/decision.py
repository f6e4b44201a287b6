# SPDX-License-Identifier: Apache-2.0
"""The decision for a field: whether it is part of the namespace, and why."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Decision:
    """One line of a table."""

    counts: bool  # its value is part of the namespace
    reason: str
    like: str = ""  # the section whose lines decide for the fields below this one


def counts(reason: str) -> Decision:
    """Returns the decision for a field that changes bytes."""
    return Decision(True, reason)


def same(reason: str) -> Decision:
    """Returns the decision for a field that cannot change bytes; ``reason`` is the argument."""
    return Decision(False, reason)


def elsewhere(where: str) -> Decision:
    """Returns the decision for a field that the part ``where`` of the namespace covers."""
    return Decision(False, f"covered by {where}")


def like(section: str, reason: str) -> Decision:
    """Returns the decision for a configuration that has the same fields as ``section``."""
    return Decision(True, reason, section)
