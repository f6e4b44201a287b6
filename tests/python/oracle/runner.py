# SPDX-License-Identifier: Apache-2.0
"""The model of the oracle: each token's KV bytes follow from its whole prefix, so all can be checked.

A token at position t of a sequence has a 64-bit digest of (cache salt, tokens 0..t); a position that an image
or an embedding fills counts with its content. Its bytes in layer l of group g on rank r are words made from
the digest and (g, l, r); where pages consist of consecutive KV heads, those of head h are made from (g, l,
h). The next token follows from the digest too, so the prompt alone determines a sequence, however often it is
preempted.

Drafter layers (EAGLE) are one token ahead: their bytes for position t follow from tokens 0..t+1. A block's
key does not cover the token after it, so its last position may hold the bytes of another continuation. vLLM
drops the last block of a hit for that reason; where it does not, only drafts are worse.

Under decode context parallelism, a block covers several times as many tokens, and each rank of a group holds
its part of them, of the same KV heads. A rank writes and checks the tokens of its part only.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

_MASK = (1 << 64) - 1
_ODD = 0x9E3779B97F4A7C15
VOCABULARY = 1000
PADDING_WORDS = 4  # at the end of a state's page: not offloaded
MAX_DRAFTS = 8


class WrongBytes(AssertionError):
    """A request was about to read KV bytes that do not belong to its prefix."""


def _mix(value: int) -> int:
    value = (value ^ (value >> 31)) * 0xD6E8FEB86659FD93 & _MASK
    return value ^ (value >> 32)


def _next(digest: int, token: int) -> int:
    return _mix(digest * 3 + token + 1 & _MASK)


@dataclass(frozen=True)
class TokenPart:
    """The tokens of a block whose KV a rank holds under decode context parallelism."""

    ranks: int = 1  # of the group that shares the tokens
    rank: int = 0  # in that group
    interleave: int = 1  # consecutive tokens on one rank

    def slots(self, block_size: int) -> np.ndarray:
        """Returns the slot in this rank's page of each token of a block, -1 for those of other ranks: the
        rule of vLLM's slot mapping (v1/worker/block_table.py).
        """
        offsets = np.arange(block_size * self.ranks)
        rounds = offsets // (self.interleave * self.ranks)
        slots = rounds * self.interleave + offsets % self.interleave
        return np.where(offsets // self.interleave % self.ranks == self.rank, slots, -1)


class Sequence:
    """The digests of a prompt and of all tokens that will be generated after it."""

    def __init__(
        self, prompt: list[int], max_tokens: int, salt: str | None, contents: Mapping[int, int] | None = None
    ) -> None:
        self.prompt_len = len(prompt)
        self.tokens = list(prompt)
        self.block_ids: list[list[int]] = []
        self.places: list[tuple[np.ndarray, np.ndarray]] = []
        self.computed = 0
        self.found = 0  # tokens that did not need computing when the request was first scheduled
        self.known = len(prompt)  # tokens that have a value: prompt and samples
        digest = _mix(sum(byte << (8 * (index % 7)) for index, byte in enumerate((salt or "").encode())) + 1)
        digests = []
        for position in range(len(prompt) + max_tokens + 2 + MAX_DRAFTS):
            if position >= len(self.tokens):
                self.tokens.append(_mix(digest ^ _ODD) % VOCABULARY)
            digest = _next(digest, self.tokens[position])
            if contents and position in contents:
                digest = _next(digest, contents[position])
            digests.append(digest)
        self.digests = np.array(digests, dtype=np.uint64)

    def hold(self, block_ids: list[list[int]], slots: list[np.ndarray]) -> None:
        """Sets the blocks of each group, and the block and slot of each position. ``slots``: TokenPart.slots
        of each group.
        """
        self.block_ids = block_ids
        self.places = [
            (np.repeat(np.array(ids, dtype=np.int64), len(each)), np.tile(each, len(ids)))
            for ids, each in zip(block_ids, slots, strict=True)
        ]


class FakeRunner:
    """One rank: checks the bytes that a forward pass would read, then writes those that it would write."""

    def __init__(
        self,
        views: list[list[np.ndarray]],
        windows: list[int | None],
        block_size: int,
        rank: int,
        draft_layers: set[tuple[int, int]] | None = None,
        heads: range | None = None,
        parts: list[TokenPart] | None = None,
        numbers: list[list[int]] | None = None,
    ) -> None:
        """``parts``: the tokens of each group that this rank holds; None: all. ``numbers``: of the layers in
        the model, by group.
        """
        self.numbers = numbers or []
        self.heads = heads
        self.windows = windows
        self.block_size = block_size  # tokens in a page
        parts = parts or [TokenPart()] * len(windows)
        self.slots = [part.slots(block_size) for part in parts]
        self.draft_layers = draft_layers or set()  # (group, layer)
        self.rng = random.Random(len(views))
        self.stale = 0
        self.copied_blocks = 0
        self.rejected = 0
        # Per group, per layer (and head): (num_blocks, block_size, words) uint64, and the words that set it
        # apart.
        self.layers: list[list[tuple[np.ndarray, np.ndarray]]] = []
        for group, layer_views in enumerate(views):
            self.layers.append([])
            for layer, view in enumerate(layer_views):
                # A page holds the bytes of each of its tokens, or one state: the state after its last token.
                tokens = 1 if windows[group] == 0 else block_size
                own = 0 if parts[group].ranks > 1 else rank
                for place, known_as in enumerate([own] if heads is None else heads):
                    count = 1 if heads is None else len(heads)
                    words = view.view(np.uint64).reshape(view.shape[0], count, tokens, -1)[:, place]
                    assert np.shares_memory(words, view)
                    salts = [
                        _mix(known_as << 40 | group << 24 | layer << 8 | word + 1)
                        for word in range(words.shape[2])
                    ]
                    self.layers[-1].append((words, np.array(salts, dtype=np.uint64)))
        self.sequences: dict[str, Sequence] = {}
        self.checked_tokens = 0

    def expect(
        self,
        request_id: str,
        prompt: list[int],
        max_tokens: int,
        salt: str | None,
        contents: Mapping[int, int] | None = None,
    ) -> None:
        """``contents``: numbers for the positions of the prompt that are not tokens."""
        self.sequences[request_id] = Sequence(prompt, max_tokens, salt, contents)

    def update(self, output: Any) -> None:
        """Applies the scheduler's output to the block tables, and copies the blocks that it requests: a state
        that a prompt shares up to the middle of a block is copied before it is overwritten.
        """
        self._copy_blocks(output.kv_cache_block_copies or [])
        for new in output.scheduled_new_reqs:
            sequence = self.sequences[new.req_id]
            sequence.hold([list(ids) for ids in new.block_ids], self.slots)
            sequence.computed = sequence.found = new.num_computed_tokens
            prefill = getattr(new, "prefill_token_ids", None)
            sequence.known = len(prefill) if prefill else sequence.prompt_len
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            sequence = self.sequences[request_id]
            blocks = cached.new_block_ids[index]
            if request_id in cached.resumed_req_ids:
                sequence.hold([list(ids) for ids in blocks], self.slots)
                sequence.known = sequence.prompt_len + cached.num_output_tokens[index]
            elif blocks is not None and any(blocks):
                pairs = zip(sequence.block_ids, blocks, strict=True)
                sequence.hold([[*known, *ids] for known, ids in pairs], self.slots)
            # If scheduled before the last step's samples, it counts all drafts of that step as right.
            sequence.computed = min(cached.num_computed_tokens[index], sequence.known - 1)

    def _copy_blocks(self, copies: list[Any]) -> None:
        """Copies whole pages, all at once; layers of several groups may share memory."""
        if not copies:
            return
        sources, targets = (np.array(ids, dtype=np.int64) for ids in zip(*copies, strict=True))
        pages = {words.ctypes.data: words for layers in self.layers for words, _ in layers}
        for words in pages.values():
            words[targets] = words[sources]
        self.copied_blocks += len(copies)

    def forward(self, output: Any) -> dict[str, list[int]]:
        """Writes, checks and samples; returns request id -> sampled tokens (none during prefill).

        All writes happen before any read, as in each layer of a model: a request may share blocks that
        another one computes in the same step.
        """
        samples: dict[str, list[int]] = {}
        for request_id in output.num_scheduled_tokens:  # a state is overwritten by the next one of its block
            self._check_states(request_id, self.sequences[request_id])
        right: dict[str, int] = {}
        for request_id, count in output.num_scheduled_tokens.items():
            sequence = self.sequences[request_id]
            drafts = output.scheduled_spec_decode_tokens.get(request_id, [])
            if -1 in drafts:  # scheduled ahead: the workers know them
                drafts = self.propose(request_id, len(drafts))
            right[request_id] = self._verified(sequence, drafts)
            end = sequence.computed + count
            known = sequence.known + len(drafts)
            assert end <= known, f"{request_id}: token {end} of {known} is not known yet"
            self._write(sequence, end, min(end, sequence.known + right[request_id]))
        for request_id, count in output.num_scheduled_tokens.items():
            sequence = self.sequences[request_id]
            self.check(request_id, sequence, sequence.computed)
            samples[request_id] = []
            if sequence.computed + count >= sequence.known:
                after = sequence.known + right[request_id] + 1
                samples[request_id] = sequence.tokens[sequence.known : after]
                sequence.known = after
        return samples

    def _verified(self, sequence: Sequence, drafts: list[int]) -> int:
        """Returns the number of leading drafts that the model would have sampled."""
        truth = sequence.tokens[sequence.known : sequence.known + len(drafts)]
        pairs = list(zip(drafts, truth, strict=True))
        right = next((index for index, (draft, token) in enumerate(pairs) if draft != token), len(pairs))
        self.rejected += len(drafts) - right
        return right

    def propose(self, request_id: str, count: int) -> list[int]:
        """Returns drafts of the next tokens, of which about a third are wrong."""
        sequence = self.sequences[request_id]
        truth = sequence.tokens[sequence.known : sequence.known + count]
        return [token if self.rng.random() < 0.7 else (token + 1) % VOCABULARY for token in truth]

    def check(self, request_id: str, sequence: Sequence, computed: int) -> None:
        """Checks every byte that attention over the computed tokens would read."""
        for group, window in enumerate(self.windows):
            if window == 0:
                continue
            first = 0 if window is None else max(0, computed - window + 1)
            if first == computed:
                continue
            blocks, slots = (places[first:computed] for places in sequence.places[group])
            if not blocks.all():
                raise WrongBytes(f"{request_id}: group {group} reads the null block")
            positions = np.arange(first, computed)
            held = slots >= 0
            blocks, slots, positions = blocks[held], slots[held], positions[held]
            for layer, (words, salts) in enumerate(self.layers[group]):
                ahead = (group, layer) in self.draft_layers
                found = words[blocks, slots]
                expected = self._bytes_of(sequence.digests[positions + ahead, None], salts)
                if np.array_equal(found, expected):
                    continue
                wrong = self._wrong_tokens(found, expected, group, layer)
                if ahead:
                    for index in np.flatnonzero(wrong):
                        wrong[index] = not self._is_of_another_continuation(
                            group, sequence, int(positions[index]), found[index], salts
                        )
                if wrong.any():
                    raise WrongBytes(
                        f"{request_id}: {int(wrong.sum())} of {len(positions)} computed tokens are wrong in "
                        f"group {group}, layer {layer}, first at {int(positions[wrong][0])} of {computed}"
                    )
            self.checked_tokens += len(positions)

    def _bytes_of(self, digests: np.ndarray, salts: np.ndarray) -> np.ndarray:
        """Returns the words of tokens with these digests in a layer."""
        return digests * salts

    def _wrong_tokens(self, found: np.ndarray, expected: np.ndarray, group: int, layer: int) -> np.ndarray:
        """Returns for each token whether its words are wrong. ``layer``: an index into self.layers[group]."""
        return (found != expected).any(axis=1)

    def _is_of_another_continuation(
        self, group: int, sequence: Sequence, position: int, found: np.ndarray, salts: np.ndarray
    ) -> bool:
        """True if these words, in a drafter's layer, follow from the same prefix and another next token."""
        if (position + 1) % len(self.slots[group]) != 0:
            return False
        digest = int(sequence.digests[position])
        nexts = np.array([_next(digest, token) for token in range(VOCABULARY)], dtype=np.uint64)
        is_stale = bool((nexts[:, None] * salts == found).all(axis=1).any())
        self.stale += is_stale
        return is_stale

    def _write(self, sequence: Sequence, end: int, right: int) -> None:
        """Writes the KV of all scheduled tokens; from ``right`` on it is the KV of rejected drafts."""
        for group, layers in enumerate(self.layers):
            if self.windows[group] == 0:
                self._write_state(group, sequence, end)
                continue
            targets: dict[bool, tuple[np.ndarray, ...]] = {}
            for layer, (words, salts) in enumerate(layers):
                ahead = (group, layer) in self.draft_layers
                if ahead not in targets:
                    targets[ahead] = self._targets(sequence, group, end, right, ahead)
                blocks, slots, values = targets[ahead]
                words[blocks, slots] = self._bytes_of(values, salts)

    def _targets(
        self, sequence: Sequence, group: int, end: int, right: int, ahead: bool
    ) -> tuple[np.ndarray, ...]:
        """Returns (block, slot, value) of each position that a step writes in a layer."""
        blocks, slots = sequence.places[group]
        # A drafter continues from its own drafts, into blocks reserved for that.
        last = min(end + MAX_DRAFTS, len(blocks)) if ahead else end
        blocks, slots = blocks[sequence.computed : last], slots[sequence.computed : last]
        positions = np.arange(sequence.computed, last)
        values = sequence.digests[np.minimum(positions + ahead, len(sequence.digests) - 1)]
        if right < last:
            values = np.where(positions < right, values, ~values)
        written = (blocks != 0) & (slots >= 0)
        return blocks[written], slots[written], values[written, None]

    def _check_states(self, request_id: str, sequence: Sequence) -> None:
        """Checks the one state from which the next token is computed: its whole page except the padding."""
        computed = sequence.computed
        for group, window in enumerate(self.windows):
            if window != 0 or computed == 0:
                continue
            block = sequence.block_ids[group][(computed - 1) // self.block_size]
            if block == 0:
                raise WrongBytes(f"{request_id}: group {group} reads the null block")
            for layer, (words, salts) in enumerate(self.layers[group]):
                used = len(salts) - PADDING_WORDS
                if (words[block, 0, :used] != sequence.digests[computed - 1] * salts[:used]).any():
                    raise WrongBytes(
                        f"{request_id}: state {computed} of group {group}, layer {layer} is wrong"
                    )
            self.checked_tokens += 1

    def _write_state(self, group: int, sequence: Sequence, end: int) -> None:
        """Leaves one state per step, in the block of its last token; the previous block keeps its state."""
        block = sequence.block_ids[group][(end - 1) // self.block_size]
        assert block != 0
        for words, salts in self.layers[group]:
            words[block, 0] = sequence.digests[end - 1] * salts
