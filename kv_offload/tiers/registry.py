# SPDX-License-Identifier: Apache-2.0
"""The kinds of tiers. To add one: a class in a file of its own, and a line at the end of this one."""

import functools
import operator
import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter

from kv_offload.tiers.base import TierConfig
from kv_offload.tiers.fs.config import FsTierConfig
from kv_offload.tiers.mooncake.config import MooncakeTierConfig
from kv_offload.tiers.redis.config import RedisTierConfig
from kv_offload.tiers.s3.config import S3TierConfig

Kind = TypeVar("Kind", bound=TierConfig)

_kinds: dict[str, type[TierConfig]] = {}
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_HOST_MEMORY = "cpu"  # the label of host memory
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(/?)")
_LOGIN = re.compile(r"(^|/)[^/]+:[^/@]*@")  # what a mistyped address has, and hardly a directory


def register(kind: type[Kind]) -> type[Kind]:
    """Make a kind known under the value of its ``type``; one that is known under it is replaced.

    Raises ValueError for a name that metrics could not tell from the label of another tier.
    """
    name = str(kind.model_fields["type"].default)
    if name == _HOST_MEMORY or _NAME.fullmatch(name) is None:
        raise ValueError(
            f"{name!r} cannot be the name of a kind of tier: use lower-case letters, digits and _, and not "
            f"{_HOST_MEMORY!r}, which is host memory"
        )
    _kinds[name] = kind
    return kind


def kinds() -> dict[str, type[TierConfig]]:
    """Every kind by its name, in the order in which they were made known."""
    return dict(_kinds)


def kind_behind(option: str) -> type[TierConfig]:
    """The kind whose places an option of the command line takes: of --disk, directories."""
    return next(kind for kind in _kinds.values() if kind.option == option)


def entry_at(place: str) -> dict[str, Any]:
    """The entry of secondary_tiers for a place as a command is given it: a directory, an address such as
    redis://host, or KIND=PLACE.

    Raises ValueError that does not repeat an address: there may be a password in it.
    """
    name, equals, rest = place.partition("=")
    if equals and name in _kinds:
        refuse_address(rest, _kinds[name])
        return _kinds[name].entry(rest)
    kind = _kind_of_address(place.strip())
    if kind is not None:
        return kind.entry_of_address(place.strip())
    refuse_address(place, kind_behind("disk"))
    return kind_behind("disk").entry(place)


def _kind_of_address(place: str) -> type[TierConfig] | None:
    scheme = _ADDRESS.match(place)
    if scheme is None:
        return None
    return next((kind for kind in _kinds.values() if scheme.group(1).lower() in kind.schemes), None)


def _is_address(text: str) -> bool:
    text = text.strip()
    scheme = _ADDRESS.match(text)
    return bool((scheme and scheme.group(2)) or _kind_of_address(text) is not None or _LOGIN.search(text))


def refuse_address(place: str, kind: type[TierConfig]) -> None:
    """ValueError when it is an address and the kind has directories; it does not repeat it."""
    if kind.option != "disk":
        return
    texts = (place, place.partition("=")[2])  # the latter of KIND=PLACE, where no kind was looked for
    named = _kinds.get(place.partition("=")[0])
    if any(map(_is_address, texts)) or (named is not None and named.option != "disk"):
        known = sorted(f"{each}://" for kind in _kinds.values() for each in kind.schemes)
        raise ValueError(
            "expected a directory but got an address, or no kind of tier has this address (it is not "
            "shown: it may contain a password); stat, ls, verify and purge accept these addresses: "
            f"{', '.join(known)}"
        )


def parse_tier(given: Any) -> TierConfig:
    """A tier from its table, of the kind that ``type`` names.

    Raises pydantic's ValidationError, which does not show what was given: there may be a password in it.
    """
    if isinstance(given, TierConfig):
        return given
    union: Any = functools.reduce(operator.or_, _kinds.values())  # of what is known now
    tagged: Any = Annotated[union, Field(discriminator="type")]
    hidden = ConfigDict(hide_input_in_errors=True)
    tier: TierConfig = TypeAdapter(tagged, config=hidden).validate_python(given)
    return tier


def labels_of(types: Sequence[str]) -> tuple[str, ...]:
    """Labels of tiers in metrics and events, by the names of their kinds: fs, fs-2, ... of each kind."""
    labels: list[str] = []
    for place, name in enumerate(types):
        before = types[:place].count(name)
        labels.append(name if before == 0 else f"{name}-{before + 1}")
    return tuple(labels)


def bounds_of(tiers: Iterable[TierConfig]) -> tuple[int | None, ...]:
    """The most bytes that each tier may hold (TierConfig.bounds), in their order."""
    tiers = tuple(tiers)
    bounds: dict[int, int | None] = {}
    for kind in {type(tier) for tier in tiers}:
        places = [place for place, tier in enumerate(tiers) if type(tier) is kind]
        bounds.update(zip(places, kind.bounds([tiers[place] for place in places]), strict=True))
    return tuple(bounds[place] for place in range(len(tiers)))


register(FsTierConfig)
register(RedisTierConfig)
register(S3TierConfig)
register(MooncakeTierConfig)
