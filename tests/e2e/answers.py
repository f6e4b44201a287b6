"""Prompts with exactly known prefixes, and the comparison that tells right answers from wrong ones."""

from __future__ import annotations

import random
from collections.abc import Sequence

from local_server import Answer, difference

BLOCK = 128  # tokens, vLLM's default on CPU
# The root mean square by which log-probabilities may differ. The test models are float32 (but for one test
# that says so): two runs of one prompt differ by about 1e-5, one wrong chunk of twenty-four changes far more
# (test_restart plants one).
NOISE = 0.005


def make_prompts(count: int, blocks: int, seed: int = 0) -> list[list[int]]:
    """``count`` prompts of ``blocks`` full blocks and five tokens more, all different from the start."""
    generator = random.Random(f"{seed}/{blocks}")
    return [[generator.randrange(2, 2048) for _ in range(blocks * BLOCK + 5)] for _ in range(count)]


def assert_same(answers: Sequence[Answer], references: Sequence[Answer]) -> None:
    distances = [difference(one, other) for one, other in zip(answers, references, strict=True)]
    assert max(distances) < NOISE, f"differences to the right answers: {distances}"
