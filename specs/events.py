# SPDX-License-Identifier: Apache-2.0
"""KV events for routers: which chunks subscribers believe to be in host memory and on storage.

Routers such as Dynamo's and llm-d's count the stores and removals of a block per medium, so every store must
be removed exactly once. The core reports changes of its own state, which are not balanced: a record that its
server evicted silently is written again, several tiers hold one chunk, and a reset reports its removals over
many steps. AdvertisedChunks publishes only changes of the subscribers' view.
"""

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from kv_offload.log import get_logger

from . import compat

logger = get_logger(__name__)

# Limit of the chunks on storage if a tier's server evicts silently: their removals may never be reported.
MAX_UNCONFIRMED = 1 << 20


@dataclass(frozen=True)
class TierEvents:
    """How a tier's events are published.

    ``locality``: LOCAL, REMOTE, or None (unspecified); routers may drop REMOTE events. ``evicts_silently``:
    the tier's server evicts records without notice, so the removal of a record may never be reported.
    """

    locality: str | None
    evicts_silently: bool = False


class AdvertisedChunks:
    """The chunks that subscribers believe to be in host memory and on storage. Used by one thread.

    A chunk that host memory evicted and is being filled with again stays advertised until that store or read
    has ended. vLLM has recorded the payload for it, and a removal would drop this payload: the next event of
    the chunk would have no tokens. Requests for the chunk wait for it meanwhile.

    All tiers form one medium for subscribers, ``STORAGE``. A chunk is published as stored there when the
    first tier has it, and as removed when the last one lost it. If the tier whose attributes were published
    loses a chunk that another tier has, or was REMOTE and another one is not, the chunk is published as
    removed and stored again.
    """

    def __init__(
        self,
        tiers: Mapping[str, TierEvents],
        absent: Callable[[Iterable[bytes]], list[bytes]],
        max_unconfirmed: int = MAX_UNCONFIRMED,
    ) -> None:
        """``tiers``: the tiers that publish events, by name. ``absent``: returns the keys that are neither in
        host memory nor being stored or read into it.
        """
        self._absent = absent
        self._tiers = tuple(tiers.values())
        self._number_of = {name: number for number, name in enumerate(tiers)}
        silent = any(tier.evicts_silently for tier in self._tiers)
        self._max_stored = max_unconfirmed if silent else None
        self._host: set[bytes] = set()
        self._leaving: dict[bytes, None] = {}  # of _host: lost since, and neither absent nor regained
        # key -> bit mask of the tiers that have it, + 256 * number of the tier with the published attributes
        self._stored: dict[bytes, int] = {}
        self._withdrawn: list[Any] = []

    def translate(self, changes: Iterable[tuple[list[bytes], bool, bool, str]]) -> Iterator[Any]:
        """Yields the events for the core's changes: (keys, on a tier, removed, name of the tier)."""
        withdrawn, self._withdrawn = self._withdrawn, []
        yield from withdrawn
        for keys, on_storage, removed, tier in changes:
            if not on_storage:
                if removed:
                    self._leaving.update((key, None) for key in keys if key in self._host)
                else:
                    yield from self._host_gained(keys)
            elif (number := self._number_of.get(tier)) is not None:
                yield from self._lost(keys, number) if removed else self._gained(keys, number)
        yield from self._host_removals()
        yield from self._withdraw_oldest()

    def found(self, keys: Collection[bytes]) -> Iterator[Any]:
        """Yields the events for chunks that are in host memory and may not be advertised."""
        yield from self._host_gained(self.unknown(dict.fromkeys(keys)))

    def unknown(self, keys: Iterable[bytes]) -> list[bytes]:
        """Returns the keys of chunks that are not advertised in host memory."""
        return [key for key in keys if key not in self._host]

    def withdraw_all(self) -> None:
        """Publishes the removal of every chunk with the next events, ahead of later changes."""
        self._withdrawn = list(self._removals())
        self._host.clear()
        self._leaving.clear()
        self._stored.clear()

    def has_withdrawals(self) -> bool:
        """True if ``translate`` has removals to publish that do not wait for any change."""
        return bool(self._withdrawn)

    def _removals(self) -> Iterator[Any]:
        yield from self._withdrawn
        if self._host:
            yield compat.make_event(list(self._host), removed=True)
        for number in range(len(self._tiers)):
            if keys := [key for key, state in self._stored.items() if state >> 8 == number]:
                yield self._on_storage(keys, number, removed=True)

    def _host_gained(self, keys: list[bytes]) -> Iterator[Any]:
        for key in keys:
            self._leaving.pop(key, None)
        if new := [key for key in keys if key not in self._host]:
            self._host.update(new)
            yield compat.make_event(new, removed=False)

    def _host_removals(self) -> Iterator[Any]:
        if gone := self._absent(self._leaving) if self._leaving else []:
            for key in gone:
                del self._leaving[key]
            self._host.difference_update(gone)
            yield compat.make_event(gone, removed=True)

    def _gained(self, keys: list[bytes], tier: int) -> Iterator[Any]:
        new: list[bytes] = []
        taken: dict[int, list[bytes]] = {}
        for key in keys:
            state = self._stored.get(key, 0)
            published = state >> 8
            if not state or self._replaces(tier, published):
                new.append(key)
                if state:
                    taken.setdefault(published, []).append(key)
                published = tier
            self._stored[key] = published << 8 | state & 255 | 1 << tier
        for published, replaced in taken.items():
            yield self._on_storage(replaced, published, removed=True)
        if new:
            yield self._on_storage(new, tier, removed=False)

    def _replaces(self, tier: int, published: int) -> bool:
        """True if the attributes of ``tier`` are published instead: routers may drop REMOTE events."""
        is_remote = [self._tiers[number].locality == "REMOTE" for number in (tier, published)]
        return is_remote == [False, True]

    def _lost(self, keys: list[bytes], tier: int) -> Iterator[Any]:
        gone: list[bytes] = []
        kept: dict[int, list[bytes]] = {}
        for key in keys:
            state = self._stored.get(key, 0)
            if not state & 1 << tier:
                continue
            state &= ~(1 << tier)
            others, published = state & 255, state >> 8
            if others and published != tier:
                self._stored[key] = state
                continue
            gone.append(key)
            if not others:
                del self._stored[key]
                continue
            heir = (others & -others).bit_length() - 1
            self._stored[key] = others | heir << 8
            kept.setdefault(heir, []).append(key)
        if gone:
            yield self._on_storage(gone, tier, removed=True)
        for heir, held in kept.items():
            yield self._on_storage(held, heir, removed=False)

    def _withdraw_oldest(self) -> Iterator[Any]:
        if self._max_stored is None or len(self._stored) <= self._max_stored:
            return
        oldest: dict[int, list[bytes]] = {}
        for key in list(self._stored)[: len(self._stored) - self._max_stored]:
            oldest.setdefault(self._stored.pop(key) >> 8, []).append(key)
        for tier, keys in oldest.items():
            yield self._on_storage(keys, tier, removed=True)

    def _on_storage(self, keys: list[bytes], tier: int, *, removed: bool) -> Any:
        attributes = self._tiers[tier]
        return compat.make_event(
            keys,
            removed=removed,
            on_storage=True,
            locality=attributes.locality,
            removal_expected=not attributes.evicts_silently,
        )


def describe_chunks(*, whole: bool) -> None:
    """Makes vLLM's self-describing events describe what requests find. Changes the tracker of this process.

    ``whole``: an event names only the last hash of a chunk, with the tokens of the chunk as its block size,
    because only a request for the whole chunk finds it (vllm#57159). Otherwise an event names all blocks of a
    chunk, as vLLM does. llm-d needs that for chunks of several blocks: it keeps one description per hash, and
    the last hash of a chunk is also that of a block in GPU memory.

    Both forms add the extra keys of the hashes (salt, images, prompt embeddings), which vLLM leaves out. A
    router would expect hits of requests with other ones.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import OffloadingEventsTracker
    from vllm.v1.core import kv_cache_utils

    if not hasattr(OffloadingEventsTracker, "_build_event_metadata"):
        logger.warning(
            "KV events name all block hashes of a chunk, although only whole chunks can be loaded: this vLLM "
            "builds its events in another way. Routers may expect hits that do not happen; set "
            "blocks_per_chunk to 1, or report this warning"
        )
        return

    def complete(payload: Any, req: Any, start: int) -> None:
        tokens = len(payload.token_ids)
        if whole:
            payload.block_hashes = payload.block_hashes[-1:]
            payload.block_size = tokens
        size = payload.block_size
        extra_keys = tuple(
            kv_cache_utils.generate_block_hash_extra_keys(req, begin, begin + size, 0)[0]
            for begin in range(start, start + tokens, size)
        )
        payload.extra_keys = extra_keys if any(extra_keys) else None

    def described(original: Any, self: Any, req: Any, group_config: Any, chunk_idx: int) -> Any:
        payload = original(self, req, group_config, chunk_idx)
        complete(payload, req, chunk_idx * len(payload.token_ids))
        _state_of(self).recorded(compat.make_key(payload.block_hashes[-1], payload.group_idx))
        return payload

    def tail(original: Any, self: Any, req: Any, group_config: Any, end: int, key: bytes) -> None:
        original(self, req, group_config, end, key)
        if (payload := self._pending_event_metadata.get(key)) is not None:
            complete(payload, req, end - len(payload.token_ids))
            _state_of(self).recorded(key)

    def store(original: Any, self: Any, req: Any, group_config: Any, chunk_idx: int, key: bytes) -> None:
        original(self, req, group_config, chunk_idx, key)
        if group_config.sliding_window_size_in_chunks is not None:
            _state_of(self).never_described(group_config.group_idx)

    def take(original: Any, self: Any, events: Iterable[Any]) -> Iterator[Any]:
        state = _state_of(self)
        for event in state.take_described():
            yield from self._take_stored_event(event)
        yield from original(self, events)
        state.withdrawn.clear()

    def stored(original: Any, self: Any, event: Any) -> Iterator[Any]:
        if not self.self_describing_enabled:
            yield from original(self, event)
            return
        state, payloads = _state_of(self), self._pending_event_metadata
        form = state.form_of(event)
        keys = [key for key in event.keys if key in payloads or not state.withhold(key, form)]
        if event.medium is compat.Medium.STORAGE and not event.removal_expected:
            for key in keys:
                if key in payloads and len(payloads[key].block_hashes) > 1:
                    state.blocks[key] = b"".join(payloads[key].block_hashes)
        if keys:
            yield from original(self, replace(event, keys=keys))

    def reset(original: Any, self: Any) -> None:
        _state_of(self).withdrawn.update(self._pending_event_metadata)
        original(self)

    def removed(original: Any, self: Any, event: Any) -> Iterator[Any]:
        state, payloads = _state_of(self), self._pending_event_metadata
        if getattr(event, "metadata_only", False):
            for key in event.keys:
                if key in payloads:
                    payloads[key].active_residencies.discard((event.medium, event.ownership))
            return
        keys = [key for key in event.keys if not state.cancel(key, event.medium)]
        usual = {}  # what to restore: payloads that this removal does not end, or None
        for key in keys:
            payload = state.payload_of(key, event.medium, key in payloads)
            if payload is not None:
                usual[key] = payloads.get(key)
                payloads[key] = payload
        if keys:
            yield from original(self, replace(event, keys=keys))
        for key, payload in usual.items():
            if payload is None:
                del payloads[key]
            else:
                payloads[key] = payload

    _wrap(OffloadingEventsTracker, "_build_event_metadata", described)
    _wrap(OffloadingEventsTracker, "_record_partial_tail", tail)
    _wrap(OffloadingEventsTracker, "record_store", store)
    _wrap(OffloadingEventsTracker, "take_events", take)
    _wrap(OffloadingEventsTracker, "_take_stored_event", stored)
    _wrap(OffloadingEventsTracker, "reset", reset)
    _wrap(OffloadingEventsTracker, "_take_removed_event", removed)


class _TrackerState:
    """What one tracker of vLLM needs to know beyond its payloads, for events that describe every chunk.

    An event without a payload has no tokens, and a router cannot place its blocks. Such a store is withheld
    until vLLM records the payload: 0.31 and 0.32 record that of a chunk read from a tier only when a request
    finds it, and no release records that of a prefetch. Groups whose chunks have no payload (windows, states)
    are published as before, once a store has shown that they are such groups.

    vLLM also drops payloads before the last removal of a chunk: all at a reset, and those of chunks on a
    server that evicts silently. The removal would then name only the last hash of the chunk.
    """

    def __init__(self) -> None:
        # Payloads from before a reset, until its removals are published.
        self.withdrawn: dict[bytes, Any] = {}
        # The joined hashes of the blocks of chunks on servers that evict silently. As for _withheld,
        # AdvertisedChunks limits the number of keys.
        self.blocks: dict[bytes, bytes] = {}
        self._withheld: dict[Any, dict[bytes, Any]] = {}  # medium -> key -> the store's form
        self._forms: list[Any] = []  # a few: shared by the withheld stores, of which there may be a million
        self._described: dict[bytes, None] = {}  # of _withheld: they can be published
        self._without_payloads: set[int] = set()  # groups

    def form_of(self, event: Any) -> Any:
        """Returns the event without its keys. Equal events have one form."""
        form = replace(event, keys=[])
        for known in self._forms:
            if known == form:
                return known
        self._forms.append(form)
        return form

    def withhold(self, key: bytes, form: Any) -> bool:
        """Withholds the store of a chunk without a payload; returns False if its group never has one."""
        if compat.group_of(key) in self._without_payloads:
            return False
        self._withheld.setdefault(form.medium, {})[key] = form
        return True

    def cancel(self, key: bytes, medium: Any) -> bool:
        """Drops a withheld store, because the chunk was removed; returns False if there is none."""
        return self._withheld.get(medium, {}).pop(key, None) is not None

    def recorded(self, key: bytes) -> None:
        """Publishes the withheld stores of a chunk with the next events."""
        if any(key in stores for stores in self._withheld.values()):
            self._described[key] = None

    def never_described(self, group: int) -> None:
        """Publishes the withheld stores of a group without payloads with the next events."""
        if group not in self._without_payloads:
            self._without_payloads.add(group)
            for stores in self._withheld.values():
                self._described.update((key, None) for key in stores if compat.group_of(key) == group)

    def take_described(self) -> list[Any]:
        """Returns the withheld stores that can be published."""
        events = [
            replace(stores.pop(key), keys=[key])
            for key in self._described
            for stores in self._withheld.values()
            if key in stores
        ]
        self._described.clear()
        return events

    def payload_of(self, key: bytes, medium: Any, is_known: bool) -> Any | None:
        """Returns what to describe a removal with instead of vLLM's payload; None: with that. ``is_known``:
        vLLM has one.
        """
        blocks = self.blocks.pop(key, None) if medium is compat.Medium.STORAGE else None
        if key in self.withdrawn:
            return self.withdrawn[key]
        if blocks is None or is_known:
            return None
        size = len(compat.block_hash_of(key))
        hashes = tuple(blocks[start : start + size] for start in range(0, len(blocks), size))
        return SimpleNamespace(
            block_hashes=hashes, group_idx=compat.group_of(key), active_residencies=set[Any]()
        )


def _state_of(tracker: Any) -> _TrackerState:
    state: _TrackerState | None = getattr(tracker, "kv_offload_state", None)
    if state is None:
        state = tracker.kv_offload_state = _TrackerState()
    return state


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replaces the method by ``around(original, self, ...)``. Replaces an earlier wrapper."""
    original = getattr(owner, name)
    original = getattr(original, "kv_offload_original", original)

    @functools.wraps(original)
    def wrapped(self: Any, *arguments: Any) -> Any:
        return around(original, self, *arguments)

    wrapped.kv_offload_original = original  # type: ignore[attr-defined]
    setattr(owner, name, wrapped)
