# SPDX-License-Identifier: Apache-2.0
"""One directory through four lives of a server: written, reloaded after damage, killed while writing, reset.

Each life is a fixture that starts where the previous one ended; the tests check the result of each life.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest
import records
import shared_memory
import waiting
from answers import BLOCK, NOISE, assert_same, make_prompts
from local_server import Answer, LocalServer, ServerError, difference
from setting import PROMPT_BLOCKS, Reference, Serve, patient_config

SWAPPED, FLIPPED, TRUNCATED = (
    3,
    4,
    5,
)  # prompts with one record each that is damaged between the first and second life
MORE_PROMPTS = 60
RECORDED_BEFORE_KILL = 200  # of the records of MORE_PROMPTS
MOST_BEHIND = 10 * PROMPT_BLOCKS  # chunks that the disk has not taken yet: a third of host memory


def serve(start: Serve, model: Path, root: Path) -> LocalServer:
    # One writer thread writes in order, so the recorded prefix has no holes.
    return start(model, patient_config("1GiB", root, n_write_threads=1))


@dataclass
class Life:
    """The answers of one server life, the server while it runs, and what kv-offload warm reported before
    the answers."""

    server: LocalServer
    answers: list[Answer]
    warmed: dict[str, Any] = field(default_factory=dict)

    def cached_blocks(self) -> list[int]:
        return [answer.cached_tokens // BLOCK for answer in self.answers]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("restart")


@pytest.fixture(scope="module")
def first(start: Serve, model: Path, reference: Reference, root: Path) -> tuple[Life, list[list[Path]]]:
    """Computes and records all prompts; returns the life and the records of each prompt."""
    of_prompt: list[list[Path]] = []
    seen: set[Path] = set()
    life = Life(serve(start, model, root), [])
    for prompt in reference.prompts:
        life.answers.append(life.server.ask(prompt))
        waiting.recorded(root, len(seen) + PROMPT_BLOCKS, life.server)
        of_prompt.append([path for path in records.files(root) if path not in seen])
        seen.update(of_prompt[-1])
    life.server.stop()
    return life, of_prompt


@pytest.fixture(scope="module")
def second(
    start: Serve, model: Path, reference: Reference, root: Path, first: tuple[Life, list[list[Path]]]
) -> Life:
    """Reloads the prompts, of which three have a damaged record. The others are warmed first."""
    of_prompt = first[1]
    middle = PROMPT_BLOCKS // 2
    records.plant(of_prompt[SWAPPED][middle], donor=of_prompt[SWAPPED][middle + 1])
    records.flip(of_prompt[FLIPPED][middle], records.HEADER + 100_000)
    records.truncate(of_prompt[TRUNCATED][middle])
    server = serve(start, model, root)
    warmed = warm(server, reference.prompts[:SWAPPED])
    return Life(server, [server.ask(prompt) for prompt in reference.prompts], warmed)


def warm(server: LocalServer, prompts: list[list[int]]) -> dict[str, Any]:
    """Sends ``prompts`` with kv-offload warm, one after the other; returns its report."""
    options = ["--url", f"http://127.0.0.1:{server.port}", "--concurrency", "1", "--json"]
    done = subprocess.run(
        [sys.executable, "-c", "from kv_offload.cli import main; main()", "warm", "-", *options],
        input="\n".join(json.dumps({"prompt": prompt}) for prompt in prompts),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def test_every_chunk_computed_is_recorded_once(
    first: tuple[Life, list[list[Path]]], reference: Reference
) -> None:
    life, of_prompt = first
    assert [len(paths) for paths in of_prompt] == [PROMPT_BLOCKS] * len(reference.prompts)
    assert_same(life.answers, reference.answers)


def test_a_restarted_server_loads_whole_prompts_from_disk(second: Life, reference: Reference) -> None:
    assert second.cached_blocks()[:SWAPPED] == [PROMPT_BLOCKS] * SWAPPED
    assert_same(second.answers[:SWAPPED], reference.answers[:SWAPPED])
    expected = sum(answer.cached_tokens for answer in second.answers)
    assert second.server.metric("kv_offload_hit_tokens_total", tier="fs") >= expected


def test_warmed_prompts_are_hit_in_host_memory(second: Life) -> None:
    # Three prompts do not fit into vLLM's own cache, and without warming no prompt is sent twice.
    whole = SWAPPED * PROMPT_BLOCKS * BLOCK
    assert (second.warmed["processed"], second.warmed["cached_tokens"]) == (SWAPPED, whole)
    assert second.server.metric("kv_offload_hit_tokens_total", tier="cpu") >= whole


def test_the_comparison_detects_one_wrong_chunk(second: Life, reference: Reference) -> None:
    # Negative control: this wrong record has valid checksums, so it is loaded like a right one.
    assert second.cached_blocks()[SWAPPED] == PROMPT_BLOCKS
    assert difference(second.answers[SWAPPED], reference.answers[SWAPPED]) > 4 * NOISE


def test_a_damaged_record_is_computed_again_and_counted(second: Life, reference: Reference) -> None:
    cached = second.cached_blocks()
    assert max(cached[FLIPPED:]) < PROMPT_BLOCKS
    assert_same(second.answers[FLIPPED:], reference.answers[FLIPPED:])
    assert second.server.metric("kv_offload_failures_total", kind="corrupt") == 2


@dataclass
class Killed:
    """The records on disk when the server was killed, and the answers until then."""

    records: int
    prompts: list[list[int]]
    answers: list[Answer]
    left_in_shm: set[str]


@pytest.fixture(scope="module")
def killed(second: Life, root: Path) -> Killed:
    """Kills all processes (SIGKILL) while the server computes and writes new prompts."""
    prompts = make_prompts(MORE_PROMPTS, PROMPT_BLOCKS, seed=1)
    answers: list[Answer] = []
    waiting.recorded(root, len(second.answers) * PROMPT_BLOCKS, second.server)
    before = len(records.files(root))
    in_memory = shared_memory.mapped(process.pid for process in second.server.processes())

    def ask_all() -> None:
        try:
            for prompt in prompts:
                answers.append(second.server.ask(prompt))
                # Full host memory evicts chunks that a slow disk has not taken yet; that would leave a hole.
                waiting.recorded(root, before + len(answers) * PROMPT_BLOCKS - MOST_BEHIND, second.server)
        except (OSError, HTTPException, ServerError, ValueError):
            return  # the kill ended the request, as intended

    asking = threading.Thread(target=ask_all)
    asking.start()
    waiting.until(
        lambda: len(records.files(root)) >= before + RECORDED_BEFORE_KILL, 240, "records of the new prompts"
    )
    second.server.kill()
    asking.join()
    assert len(answers) < MORE_PROMPTS, "the server finished before it was killed"
    asked = prompts[: len(answers) + 1]
    return Killed(len(records.files(root)), asked, answers, shared_memory.left(in_memory))


@pytest.fixture(scope="module")
def third(start: Serve, model: Path, reference: Reference, root: Path, killed: Killed) -> Life:
    server = serve(start, model, root)
    return Life(server, [server.ask(prompt) for prompt in reference.prompts + killed.prompts])


def test_after_a_kill_every_recorded_chunk_is_hit(third: Life, killed: Killed) -> None:
    assert sum(third.cached_blocks()) >= 0.99 * killed.records
    assert third.server.metric("kv_offload_failures_total") == 0


def test_after_a_kill_the_answers_are_the_same(third: Life, reference: Reference, killed: Killed) -> None:
    of_reference = len(reference.prompts)
    assert_same(third.answers[:SWAPPED], reference.answers[:SWAPPED])
    given = len(killed.answers)
    assert_same(third.answers[of_reference : of_reference + given], killed.answers)


def test_a_kill_leaves_nothing_in_shared_memory(killed: Killed) -> None:
    assert killed.left_in_shm == set()


@pytest.fixture(scope="module")
def reset(third: Life, reference: Reference, root: Path) -> Answer:
    """Resets all caches while serving; sends the first prompt again, which records it again."""
    waiting.reset(third.server)
    answer = third.server.ask(reference.prompts[0])
    waiting.written(third.server)
    third.server.stop()
    return answer


@pytest.fixture(scope="module")
def fourth(start: Serve, model: Path, reference: Reference, root: Path, reset: Answer) -> Iterator[Life]:
    with serve(start, model, root) as server:
        yield Life(server, [server.ask(prompt) for prompt in reference.prompts[:2]])


def test_nothing_is_hit_after_a_reset(reset: Answer, reference: Reference) -> None:
    assert reset.cached_tokens == 0
    assert_same([reset], reference.answers[:1])


def test_a_restart_after_a_reset_starts_empty(fourth: Life, reference: Reference) -> None:
    # The first prompt was recorded again after the reset. Its weights are unknown to the fourth life: the
    # third life may have changed them in memory.
    assert fourth.cached_blocks() == [0, 0]
    assert_same(fourth.answers, reference.answers[:2])
