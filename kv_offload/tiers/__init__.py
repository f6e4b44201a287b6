"""The kinds of tiers. To add one: a class in a file of its own, and a line at the end of this one."""

import functools
import operator
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import Field, TypeAdapter

from kv_offload.tiers.base import TierConfig
from kv_offload.tiers.fs import FsTierConfig
from kv_offload.tiers.redis import RedisTierConfig

Kind = TypeVar("Kind", bound=TierConfig)

_kinds: dict[str, type[TierConfig]] = {}


def register(kind: type[Kind]) -> type[Kind]:
    """Make a kind known under the value of its ``type``. A name that is known is replaced."""
    _kinds[str(kind.model_fields["type"].default)] = kind
    return kind


def kinds() -> dict[str, type[TierConfig]]:
    """Every kind by its name, in the order in which they were made known."""
    return dict(_kinds)


def parse_tier(given: Any) -> TierConfig:
    """A tier from its table, of the kind that ``type`` names. Raises pydantic's ValidationError."""
    if isinstance(given, TierConfig):
        return given
    union: Any = functools.reduce(operator.or_, _kinds.values())  # of what is known now
    tagged: Any = Annotated[union, Field(discriminator="type")] if len(_kinds) > 1 else union
    tier: TierConfig = TypeAdapter(tagged).validate_python(given)
    return tier


def names_of(tiers: Sequence[TierConfig]) -> tuple[str, ...]:
    """Labels of tiers in metrics and events: fs, fs-2, ... of each kind."""
    names: list[str] = []
    for tier in tiers:
        before = sum(other.type == tier.type for other in tiers[: len(names)])
        names.append(tier.type if before == 0 else f"{tier.type}-{before + 1}")
    return tuple(names)


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
