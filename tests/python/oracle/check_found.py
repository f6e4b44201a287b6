# SPDX-License-Identifier: Apache-2.0
"""Checks the number of tokens found, in addition to their bytes.

For every model class, chunk size and window, the chunks that vLLM offers are found as often as with a manager
that keeps everything (oracle.reference). test_oracle.py runs this under each vLLM release; every loaded byte
is checked too. KV_OFFLOAD_FOUND=all runs all cells.
"""

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import adapter
import pytest

adapter.use_specs()

from oracle.check_oracle import FULL, MINOR, PATIENT_MS, boot, chunks_of  # noqa: E402
from oracle.engine import STATE, Engine, Setup  # noqa: E402
from oracle.reference import reference_engine  # noqa: E402

ROOMY = replace(
    FULL,
    layers=2,
    # Every stored chunk is loaded; its cost on a busy machine must not influence the result.
    extra={"cpu_bytes_to_use": "32MiB", "load_policy": "always", "lookup_timeout_ms": PATIENT_MS},
    num_blocks=200,
    max_model_len=1100,
    max_batched_tokens=512,
    retention=None,
)
CLASSES: dict[str, Setup] = {
    "full attention": ROOMY,
    "window of 32": replace(ROOMY, window=32),
    "window of 128": replace(ROOMY, window=128),
    "states": replace(ROOMY, window=STATE),
    "a drafter": replace(ROOMY, drafts=2),
    "window of 128, a drafter": replace(ROOMY, window=128, drafts=2),
    "window of 32, a drafter of two modules": replace(ROOMY, window=32, drafts=2, modules=True),
    "window of 32, two ranks": replace(ROOMY, window=32, world_size=2),
    "replicated, two ranks": replace(ROOMY, replicated=True, world_size=2),
}
CHUNKS = (1, 2, 4, 8, 16)
GROWTHS = (100, 37, 64)  # tokens per turn: a partial block, a few tokens, whole chunks
ALL = os.environ.get("KV_OFFLOAD_FOUND") == "all"
# Cells for CI: the largest chunk of each class, where nothing was found before, and chunks around each
# window.
SHORT = {
    ("full attention", 16),
    ("window of 32", 2),
    ("window of 32", 4),
    ("window of 32", 16),
    ("window of 128", 8),
    ("window of 128", 16),
    ("states", 4),
    ("window of 128, a drafter", 16),
    ("window of 32, a drafter of two modules", 4),
    ("replicated, two ranks", 8),
}


@dataclass(frozen=True)
class Answer:
    """The result of one request: tokens that were not computed; ``right``: so were their bytes."""

    asked: int
    found: int
    right: bool


class Asker:
    """Sends one request at a time to an engine and waits until no work is pending."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.answers: list[Answer] = []

    def ask(self, prompt: list[int], max_tokens: int = 1) -> list[int]:
        """Returns the prompt with its answer."""
        name = f"r{len(self.answers)}"
        request = self.engine.add(name, prompt, max_tokens)
        self.engine.drain()
        _, _, runner = self.engine.ranks[0]
        right = all(name not in getattr(each, "wrong", ()) for _, _, each in self.engine.ranks)
        self.answers.append(Answer(len(prompt), runner.sequences[name].found, right))
        return list(request.all_token_ids)

    def forget_device_cache(self) -> None:
        assert self.engine.scheduler.reset_prefix_cache()


def conversations(asker: Asker) -> None:
    """Sends conversations that grow while vLLM's own cache holds them, and each again without that cache.
    Also sends parts of each, which end elsewhere.
    """
    for growth in GROWTHS:
        rng = random.Random(growth)
        said: list[int] = []
        for _ in range(8):
            said = asker.ask([*said, *(rng.randrange(1000) for _ in range(growth))], max_tokens=5)
        asker.forget_device_cache()
        asker.ask(said)
        for part in (len(said) - growth, len(said) // 256 * 256, len(said) // 2 // 16 * 16 + 1):
            asker.forget_device_cache()
            asker.ask(said[:part])


def single_turns(asker: Asker) -> None:
    rng = random.Random(3)
    prompts = [[rng.randrange(1000) for _ in range(tokens)] for tokens in (33, 256, 300, 512, 777)]
    for _ in range(2):
        for prompt in prompts:
            asker.forget_device_cache()
            asker.ask(prompt)


def alternating(asker: Asker) -> None:
    """Sends a conversation whose device cache is cleared in every second turn."""
    rng = random.Random(5)
    said: list[int] = []
    for turn in range(9):
        if turn % 2:
            asker.forget_device_cache()
        said = asker.ask([*said, *(rng.randrange(1000) for _ in range(90))], max_tokens=7)


SCRIPTS: tuple[Callable[[Asker], None], ...] = (single_turns, conversations, alternating)


def play(engine: Engine) -> list[Answer]:
    try:
        asker = Asker(engine)
        for script in SCRIPTS:
            asker.forget_device_cache()
            script(asker)
        return asker.answers
    finally:
        engine.shutdown()


def cells() -> Iterator[tuple[str, int]]:
    for name in CLASSES:
        for blocks in CHUNKS:
            if "replicated" in name and MINOR < (0, 32):
                continue
            if ALL or (name, blocks) in SHORT:
                yield name, blocks


def compare(setup: Setup) -> tuple[list[Answer], list[Answer]]:
    """Returns (our, the reference's) answers to the same requests."""
    return play(boot(setup)), play(reference_engine(setup, boot))


def losses(ours: list[Answer], kept: list[Answer]) -> list[str]:
    """Lists requests for which we find less than the reference, or more, which cannot be right."""
    return [
        f"request {number} of {mine.asked} tokens: {mine.found} found, {best.found} by keeping everything"
        for number, (mine, best) in enumerate(zip(ours, kept, strict=True))
        if mine.found != best.found and best.right
    ]


@pytest.mark.parametrize(("name", "blocks"), list(cells()))
def test_no_chunk_is_lost_compared_with_an_unbounded_manager(name: str, blocks: int) -> None:
    ours, kept = compare(chunks_of(CLASSES[name], blocks))
    print(name, blocks, sum(answer.found for answer in ours), sum(answer.found for answer in kept))
    assert losses(ours, kept) == []
    assert sum(answer.found for answer in ours) > 0
