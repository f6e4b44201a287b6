# SPDX-License-Identifier: Apache-2.0
"""Prompts with known prefixes, and a comparison that separates right answers from wrong ones."""

from __future__ import annotations

import random
from collections.abc import Sequence

from local_server import Answer, difference

BLOCK = 128  # tokens, vLLM's default on CPU
# The largest root mean square difference between log-probabilities. Except in one test that says so, the
# models are float32: two runs of a prompt differ by about 1e-5, and one wrong chunk of 24 changes far more
# (test_restart plants one).
NOISE = 0.005


def make_prompts(count: int, blocks: int, seed: int = 0) -> list[list[int]]:
    """Returns ``count`` prompts of ``blocks`` full blocks plus five tokens; all differ from the start."""
    generator = random.Random(f"{seed}/{blocks}")
    return [[generator.randrange(2, 2048) for _ in range(blocks * BLOCK + 5)] for _ in range(count)]


def assert_same(answers: Sequence[Answer], references: Sequence[Answer]) -> None:
    distances = [difference(one, other) for one, other in zip(answers, references, strict=True)]
    assert max(distances) < NOISE, f"differences from the right answers: {distances}"
