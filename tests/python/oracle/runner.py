"""The model of the oracle: each token's KV bytes follow from its whole prefix, so all can be checked.

A token at position t of a sequence has a 64-bit digest of (cache salt, tokens 0..t). Its bytes in layer l of
group g on rank r are words made from the digest and (g, l, r). The next token follows from the digest too, so
a sequence is known from its prompt alone, however often it is preempted.
"""

from typing import Any

import numpy as np

_MASK = (1 << 64) - 1
_ODD = 0x9E3779B97F4A7C15
VOCABULARY = 1000
PADDING_WORDS = 4  # at the end of a state's page: not offloaded


class WrongBytes(AssertionError):
    """A request was about to read KV bytes that are not those of its prefix."""


def _mix(value: int) -> int:
    value = (value ^ (value >> 31)) * 0xD6E8FEB86659FD93 & _MASK
    return value ^ (value >> 32)


class Sequence:
    """The digests of a prompt and of all that will be generated after it."""

    def __init__(self, prompt: list[int], max_tokens: int, salt: str | None) -> None:
        self.prompt_len = len(prompt)
        self.tokens = list(prompt)
        self.block_ids: list[list[int]] = []
        self.computed = 0
        self.found = 0  # tokens that were not computed: how many there were when it was first scheduled
        self.known = len(prompt)  # tokens that have a value: prompt and samples
        digest = _mix(sum(byte << (8 * (index % 7)) for index, byte in enumerate((salt or "").encode())) + 1)
        digests = []
        for position in range(len(prompt) + max_tokens + 2):
            if position >= len(self.tokens):
                self.tokens.append(_mix(digest ^ _ODD) % VOCABULARY)
            digest = _mix(digest * 3 + self.tokens[position] + 1 & _MASK)
            digests.append(digest)
        self.digests = np.array(digests, dtype=np.uint64)


class FakeRunner:
    """One rank: writes what a forward pass would write, after checking what it would read."""

    def __init__(
        self, views: list[list[np.ndarray]], windows: list[int | None], block_size: int, rank: int
    ) -> None:
        self.block_size, self.windows = block_size, windows
        # Per group, per layer: (num_blocks, block_size, words) uint64, and what sets this layer apart.
        self.layers: list[list[tuple[np.ndarray, np.ndarray]]] = []
        for group, layer_views in enumerate(views):
            self.layers.append([])
            for layer, view in enumerate(layer_views):
                # A page holds the bytes of each of its tokens, or one state: that after its last token.
                tokens = 1 if windows[group] == 0 else block_size
                words = view.view(np.uint64).reshape(view.shape[0], tokens, -1)
                assert np.shares_memory(words, view)
                salts = [
                    _mix(rank << 40 | group << 24 | layer << 8 | word + 1) for word in range(words.shape[2])
                ]
                self.layers[-1].append((words, np.array(salts, dtype=np.uint64)))
        self.sequences: dict[str, Sequence] = {}
        self.checked_tokens = 0

    def expect(self, request_id: str, prompt: list[int], max_tokens: int, salt: str | None) -> None:
        self.sequences[request_id] = Sequence(prompt, max_tokens, salt)

    def update(self, output: Any) -> None:
        """The block tables, as the scheduler's output changes them."""
        for new in output.scheduled_new_reqs:
            sequence = self.sequences[new.req_id]
            sequence.block_ids = [list(ids) for ids in new.block_ids]
            sequence.computed = sequence.found = new.num_computed_tokens
            prefill = getattr(new, "prefill_token_ids", None)
            sequence.known = len(prefill) if prefill else sequence.prompt_len
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            sequence = self.sequences[request_id]
            blocks = cached.new_block_ids[index]
            if request_id in cached.resumed_req_ids:
                sequence.block_ids = [list(ids) for ids in blocks]
                sequence.known = sequence.prompt_len + cached.num_output_tokens[index]
            elif blocks is not None:
                for known, ids in zip(sequence.block_ids, blocks, strict=True):
                    known.extend(ids)
            sequence.computed = cached.num_computed_tokens[index]

    def forward(self, output: Any) -> dict[str, list[int]]:
        """Write, check, sample: request id -> sampled tokens (none while its prompt is being computed).

        All write before any reads, as in each layer of a model: a request may share blocks that another one
        computes in the same step.
        """
        assert not output.kv_cache_block_copies
        samples: dict[str, list[int]] = {}
        for request_id in output.num_scheduled_tokens:  # a state is overwritten by the next of its block
            self._check_states(request_id, self.sequences[request_id])
        for request_id, count in output.num_scheduled_tokens.items():
            sequence = self.sequences[request_id]
            end = sequence.computed + count
            assert end <= sequence.known, f"{request_id}: token {end} of {sequence.known} is not known yet"
            self._write(sequence, sequence.computed, end)
        for request_id, count in output.num_scheduled_tokens.items():
            sequence = self.sequences[request_id]
            self.check(request_id, sequence, sequence.computed)
            samples[request_id] = []
            if sequence.computed + count == sequence.known:
                samples[request_id].append(sequence.tokens[sequence.known])
                sequence.known += 1
        return samples

    def check(self, request_id: str, sequence: Sequence, computed: int) -> None:
        """Every byte that attention over the computed tokens would read."""
        for group, window in enumerate(self.windows):
            if window == 0:
                continue
            first = 0 if window is None else max(0, computed - window + 1)
            positions = np.arange(first, computed)
            if not len(positions):
                continue
            blocks = np.array(sequence.block_ids[group], dtype=np.int64)[positions // self.block_size]
            if (blocks == 0).any():
                raise WrongBytes(f"{request_id}: group {group} reads the null block")
            for layer, (words, salts) in enumerate(self.layers[group]):
                found = words[blocks, positions % self.block_size]
                wrong = (found != sequence.digests[positions, None] * salts).any(axis=1)
                if wrong.any():
                    raise WrongBytes(
                        f"{request_id}: {int(wrong.sum())} of {len(positions)} computed tokens are wrong in "
                        f"group {group}, layer {layer}, first at {int(positions[wrong][0])} of {computed}"
                    )
            self.checked_tokens += len(positions)

    def _write(self, sequence: Sequence, start: int, end: int) -> None:
        positions = np.arange(start, end)
        for group, layers in enumerate(self.layers):
            if self.windows[group] == 0:
                self._write_states(group, sequence, start, end)
                continue
            blocks = np.array(sequence.block_ids[group], dtype=np.int64)[positions // self.block_size]
            written = blocks != 0
            for words, salts in layers:
                values = sequence.digests[positions[written], None] * salts
                words[blocks[written], positions[written] % self.block_size] = values

    def _check_states(self, request_id: str, sequence: Sequence) -> None:
        """The one state that the next token is computed from; of its page, all but the padding."""
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

    def _write_states(self, group: int, sequence: Sequence, start: int, end: int) -> None:
        for index in range(start // self.block_size, (end - 1) // self.block_size + 1):
            block = sequence.block_ids[group][index]
            last = min((index + 1) * self.block_size, end) - 1
            for words, salts in self.layers[group]:
                if block != 0:
                    words[block, 0] = sequence.digests[last] * salts
