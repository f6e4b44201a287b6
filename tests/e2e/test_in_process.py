# SPDX-License-Identifier: Apache-2.0
"""Engines in the caller's process, as in scripts: resets, and two engines over kept memory and a disk."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import shared_memory
from answers import BLOCK, NOISE, make_prompts
from forked_process import Zygote
from setting import GPU_BLOCKS, SCRIPT_ENVIRONMENT, patient_config

BLOCKS = 6  # per prompt
PROMPTS = make_prompts(2, BLOCKS, seed=29)
SCRIPT = Path(__file__).parent / "in_process.py"
Rounds = list[list[dict[str, Any]]]


@dataclass
class Lives:
    """Runs one engine after another over the same root."""

    zygote: Zygote
    model: Path
    folder: Path
    number: int = 0
    left: set[str] = field(default_factory=set)  # files that the last engine left in shared memory

    def live(self, rounds: list[tuple[str, int]], **extra: Any) -> Rounds:
        self.number += 1
        root = self.folder / "root"
        transfer = patient_config("64MiB", root)
        transfer["kv_connector_extra_config"] |= extra
        job, answers = (self.folder / f"{kind}-{self.number}.json" for kind in ("job", "answers"))
        options = {
            "model": str(self.model),
            "dtype": "float32",  # the model's own; vLLM would choose another dtype on some processors
            "max_model_len": 2048,
            "num_gpu_blocks_override": GPU_BLOCKS,
            "kv_transfer_config": transfer,
        }
        parts = {"options": options, "prompts": PROMPTS, "rounds": rounds, "root": str(root)}
        job.write_text(json.dumps(parts))
        log = self.folder / f"log-{self.number}"
        environment = SCRIPT_ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        engine = self.zygote.start([str(SCRIPT), str(job), str(answers)], environment, log)
        assert engine.wait(540) == 0, log.read_text()[-8000:]
        found = json.loads(answers.read_text())
        self.left = set(found["left"])
        answers_of_rounds: Rounds = found["rounds"]
        return answers_of_rounds


@pytest.fixture
def lives(zygote: Zygote, model: Path, tmp_path: Path) -> Iterator[Lives]:
    lives = Lives(zygote, model, tmp_path)
    yield lives
    for name in lives.left:
        Path(shared_memory.DIRECTORY, name).unlink(missing_ok=True)


def cached_blocks(answers: list[dict[str, Any]]) -> list[int]:
    return [answer["cached_tokens"] // BLOCK for answer in answers]


def assert_same(answers: list[dict[str, Any]], references: list[dict[str, Any]]) -> None:
    for one, other in zip(answers, references, strict=True):
        assert one["token_ids"] == other["token_ids"]
        assert one["logprobs"] == pytest.approx(other["logprobs"], abs=NOISE)


def test_with_fixed_weights_resets_and_restarts_keep_all_chunks(lives: Lives) -> None:
    kept = {"fixed_weights": True, "keep_host_memory": True}
    rounds = [("nothing", 2 * BLOCKS), ("reset vLLM's cache", 0), ("reset both caches", 0)]
    first, *later = lives.live(rounds, **kept)
    assert cached_blocks(first) == [0, 0]
    (region,) = lives.left
    (after,) = lives.live([("nothing", 0)], **kept)
    assert lives.left == {region}
    for answers in (*later, after):
        assert cached_blocks(answers) == [BLOCKS, BLOCKS]
        assert_same(answers, first)


def test_by_default_a_reset_of_both_caches_invalidates_all_records(lives: Lives) -> None:
    rounds = [("nothing", 2 * BLOCKS), ("reset vLLM's cache", 0), ("reset both caches", 2 * BLOCKS)]
    first, found, gone = lives.live(rounds)
    assert cached_blocks(found) == [BLOCKS, BLOCKS]
    assert cached_blocks(gone) == [0, 0]
    assert lives.left == set()
    (after,) = lives.live([("nothing", 0)])
    assert cached_blocks(after) == [0, 0], (
        "only the engine that was reset may load records of changed weights"
    )
    for answers in (found, gone, after):
        assert_same(answers, first)
