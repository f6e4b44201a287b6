# SPDX-License-Identifier: Apache-2.0
"""The kinds of tiers. A new kind needs a class in its own file and a line at the end of this file."""

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
_LOGIN = re.compile(r"(^|/)[^/]+:[^/@]*@")  # common in mistyped addresses, rare in directories


def register(kind: type[Kind]) -> type[Kind]:
    """Registers a kind under the value of its ``type``; replaces a kind that has the same one.

    Raises ValueError for a name that could be the label of another tier in metrics.
    """
    name = str(kind.model_fields["type"].default)
    if name == _HOST_MEMORY or _NAME.fullmatch(name) is None:
        raise ValueError(
            f"{name!r} cannot be the name of a type of tier: use lower-case letters, digits and _, and not "
            f"{_HOST_MEMORY!r}, which is host memory"
        )
    _kinds[name] = kind
    return kind


def kinds() -> dict[str, type[TierConfig]]:
    """Returns every kind by its name, in order of registration."""
    return dict(_kinds)


def kind_of_tier(option: str) -> type[TierConfig]:
    """Returns the kind whose places a command-line option takes: directories for --disk."""
    return next(kind for kind in _kinds.values() if kind.option == option)


def entry_at(place: str) -> dict[str, Any]:
    """Returns the entry in secondary_tiers for a place on the command line: a directory, an address such as
    redis://host, or TYPE=PLACE.

    Raises ValueError, which does not show an address because it may contain a password.
    """
    name, equals, rest = place.partition("=")
    if equals and name in _kinds:
        refuse_address(rest, _kinds[name])
        return _kinds[name].entry(rest)
    kind = _kind_of_address(place.strip())
    if kind is not None:
        return kind.entry_of_address(place.strip())
    refuse_address(place, kind_of_tier("disk"))
    return kind_of_tier("disk").entry(place)


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
    """Raises ValueError, which does not show ``place``, if it is an address and the kind takes
    directories."""
    if kind.option != "disk":
        return
    texts = (place, place.partition("=")[2])  # the second for TYPE=PLACE with an unknown type
    named = _kinds.get(place.partition("=")[0])
    if any(map(_is_address, texts)) or (named is not None and named.option != "disk"):
        known = sorted(f"{each}://" for kind in _kinds.values() for each in kind.schemes)
        raise ValueError(
            "expected a directory but got an address, or no type of tier has this address (it is not "
            "shown: it may contain a password); stat, ls, verify, purge and copy accept these addresses: "
            f"{', '.join(known)}"
        )


def parse_tier(given: Any) -> TierConfig:
    """Returns the tier for an entry, of the kind that ``type`` names.

    Raises pydantic's ValidationError, which does not show the input because it may contain a password.
    """
    if isinstance(given, TierConfig):
        return given
    union: Any = functools.reduce(operator.or_, _kinds.values())  # of the kinds registered so far
    tagged: Any = Annotated[union, Field(discriminator="type")]
    hidden = ConfigDict(hide_input_in_errors=True)
    tier: TierConfig = TypeAdapter(tagged, config=hidden).validate_python(given)
    return tier


def labels_of(types: Sequence[str]) -> tuple[str, ...]:
    """Returns the labels of tiers in metrics and events, numbered per kind: fs, fs-2, ..."""
    labels: list[str] = []
    for place, name in enumerate(types):
        before = types[:place].count(name)
        labels.append(name if before == 0 else f"{name}-{before + 1}")
    return tuple(labels)


def bounds_of(tiers: Iterable[TierConfig]) -> tuple[int | None, ...]:
    """Returns the size limit of each tier in bytes (TierConfig.bounds), in their order."""
    tiers = tuple(tiers)
    bounds: dict[int, int | None] = {}
    for kind in {type(tier) for tier in tiers}:
        places = [place for place, tier in enumerate(tiers) if type(tier) is kind]
        bounds.update(zip(places, kind.bounds([tiers[place] for place in places]), strict=True))
    return tuple(bounds[place] for place in range(len(tiers)))


def cautions_of(tiers: Iterable[TierConfig]) -> list[str]:
    """Returns settings of the tiers that work but are probably mistakes."""
    tiers = tuple(tiers)
    texts = [text for tier in tiers for text in tier.cautions()]
    for kind in dict.fromkeys(type(tier) for tier in tiers):
        texts += kind.cautions_together([tier for tier in tiers if type(tier) is kind])
    return texts


register(FsTierConfig)
register(RedisTierConfig)
register(S3TierConfig)
register(MooncakeTierConfig)
