# SPDX-License-Identifier: Apache-2.0
"""Run by test_oracle.py under each vLLM release: images, prompt embeddings, layers that share a cache."""

import random
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import adapter
import pytest
import torch

adapter.use_specs()

from oracle.check_oracle import FULL, HYBRID, _check_at_rest, _until_written, chunks_of, live, with_disk  # noqa: E402
from oracle.drive import Rates  # noqa: E402
from oracle.engine import Engine, Setup  # noqa: E402
from oracle.inputs import PLACEHOLDER, Image, Inputs  # noqa: E402
from oracle.runner import WrongBytes  # noqa: E402

TOKENS = 150  # per prompt; 144 of them are in whole blocks
WIDTH = 8  # of an embedding
IMAGES = replace(FULL, encoder_tokens=96)
Prompt = tuple[list[int], Inputs]


@contextmanager
def running(setup: Setup, model_dir: str | None = None) -> Iterator[Engine]:
    engine = Engine(setup, f"oracle-{uuid.uuid4()}", model_dir)
    try:
        yield engine
        _check_at_rest(engine)
    finally:
        engine.shutdown()


def ask(engine: Engine, prompt: Prompt) -> int:
    """Sends one prompt alone with an empty GPU cache; returns the number of its tokens that we loaded."""
    assert engine.scheduler.reset_prefix_cache()
    tokens, inputs = prompt
    engine.add("asked", tokens, 1, inputs=inputs)
    engine.drain()
    _until_written(engine)
    _, _, runner = engine.ranks[0]
    return int(runner.sequences["asked"].found)


def text(seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, PLACEHOLDER) for _ in range(TOKENS)]


def with_images(*images: Image) -> Prompt:
    """Returns the same text for all images at the same places."""
    tokens = text()
    for image in images:
        tokens[image.offset : image.offset + image.length] = [PLACEHOLDER] * image.length
    return tokens, Inputs(images=images)


def embedded(
    changed: Sequence[int] = (), is_token: Callable[[int], bool] | None = None, seed: int = 0
) -> Prompt:
    """Returns embeddings; in the rows ``changed`` the last bit of one value differs. Where ``is_token`` is
    true the token counts and its row is zero, as vLLM's front end makes it.
    """
    rows = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed))
    for row in changed:
        rows.view(torch.int32)[row, WIDTH - 1] ^= 1
    if is_token is None:
        return [0] * TOKENS, Inputs(embeddings=rows)
    flags = [is_token(position) for position in range(TOKENS)]
    rows[torch.tensor(flags)] = 0
    tokens = [token if flag else 0 for token, flag in zip(text(), flags, strict=True)]
    return tokens, Inputs(embeddings=rows, is_token=flags)


def shuffled(prompts: Sequence[Prompt], setup: Setup, steps: int = 300) -> Engine:
    """Sends random subsets of ``prompts``; every byte that they read is checked."""
    rng = random.Random(len(prompts))
    with running(setup) as engine:
        for step in range(steps):
            if len(engine.scheduler.requests) < 4 and rng.random() < 0.4:
                tokens, inputs = rng.choice(prompts)
                engine.add(f"r{step}", tokens, rng.randrange(1, 24), inputs=inputs)
            if engine.scheduler.requests and rng.random() < 0.03:
                engine.abort(rng.choice(sorted(engine.scheduler.requests)))
            if rng.random() < 0.1:
                engine.scheduler.reset_prefix_cache()
            engine.step_idle()
        engine.drain()
        _, _, runner = engine.ranks[0]
        assert sum(sequence.found > 0 for sequence in runner.sequences.values()) > 20
        return engine


# ---- images

PLACES = {  # (offset, length) of each image of a prompt, for chunks of 16 or 32 tokens
    "over the border of two chunks": [(25, 20)],
    "at the end of a chunk": [(56, 8)],
    "at the start of a chunk": [(64, 5)],
    "one chunk": [(32, 32)],
    "several chunks": [(20, 70)],
    "two in a chunk": [(66, 6), (75, 4)],
    "one next to the other": [(30, 34), (64, 20)],
    "at the end of the prompt": [(130, 20)],
}


def images_at(places: Sequence[tuple[int, int]], *contents: str) -> list[Image]:
    return [
        Image(content, offset, length) for content, (offset, length) in zip(contents, places, strict=True)
    ]


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("where", PLACES)
def test_the_same_image_hits_and_another_image_misses_from_its_chunk_on(
    where: str, blocks: int, tmp_path: Path
) -> None:
    places, chunk = PLACES[where], 16 * blocks
    setup = with_disk(chunks_of(IMAGES, blocks), tmp_path / "root", max_bytes="64MiB")
    cats = ["cat", "tiger"][: len(places)]  # an image has the same number of tokens at every place
    original = with_images(*images_at(places, *cats))
    whole = (TOKENS - 1) // chunk * chunk
    with running(setup) as engine:
        assert ask(engine, original) == 0
        assert ask(engine, original) == whole
        for number, (offset, _) in enumerate(places):
            others = [*cats[:number], f"dog {number}", *cats[number + 1 :]]
            assert ask(engine, with_images(*images_at(places, *others))) == offset // chunk * chunk
    with running(setup, engine.model_dir) as after:
        assert ask(after, original) == whole


def test_images_at_other_offsets_or_swapped_miss() -> None:
    with running(IMAGES) as engine:
        first = with_images(Image("cat", 32, 16), Image("dog", 48, 16))
        assert ask(engine, first) == 0
        assert ask(engine, with_images(Image("dog", 32, 16), Image("cat", 48, 16))) == 32
        assert ask(engine, with_images(Image("large cat", 32, 32))) == 32
        assert ask(engine, with_images(Image("cat", 31, 16), Image("dog", 47, 16))) == 16
        assert ask(engine, first) == 144


@pytest.mark.parametrize("setup", [IMAGES, replace(HYBRID, encoder_tokens=40)], ids=["full", "hybrid"])
def test_every_byte_of_image_prompts_is_right(setup: Setup) -> None:
    def image(content: str, offset: int, length: int) -> Image:
        fitting = min(length, setup.encoder_tokens)
        return Image(f"{content} of {fitting} tokens", offset, fitting)

    prompts = [
        with_images(*(image(content, offset, length) for offset, length in places))
        for content in ("cat", "dog", "cow")
        for places in PLACES.values()
    ]
    shuffled(prompts, setup)


def test_numbered_images_without_a_hash_are_detected() -> None:
    # As in vLLM with --no-enable-prefix-caching and --mm-processor-cache-gb 0, numbered from 0 in each
    # process.
    def ask_for_both() -> None:
        with running(IMAGES) as engine:
            for content in ("cat", "dog"):
                ask(engine, with_images(Image(content, 25, 20, identifier="renderer0-mm-1-image-0")))

    with pytest.raises(WrongBytes):
        ask_for_both()


# ---- embeddings

MIXED = {"embeddings": None, "embeddings and tokens": lambda position: position % 40 < 10}


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("kind", MIXED)
def test_the_same_embeddings_hit_and_others_miss_from_their_chunk_on(
    kind: str, blocks: int, tmp_path: Path
) -> None:
    chunk = 16 * blocks
    setup = with_disk(chunks_of(FULL, blocks), tmp_path / "root", max_bytes="64MiB")
    whole = (TOKENS - 1) // chunk * chunk
    with running(setup) as engine:
        assert ask(engine, embedded(is_token=MIXED[kind])) == 0
        assert ask(engine, embedded(is_token=MIXED[kind])) == whole
        for row in (15, 16, 76, 119, 149):
            found = ask(engine, embedded([row], is_token=MIXED[kind]))
            assert found == min(row // chunk * chunk, whole)
        assert ask(engine, embedded(is_token=MIXED[kind], seed=1)) == 0
        assert ask(engine, ([0] * TOKENS, Inputs())) == 0  # the tokens that vLLM substitutes for embeddings
    with running(setup, engine.model_dir) as after:
        assert ask(after, embedded(is_token=MIXED[kind])) == whole


@pytest.mark.parametrize("setup", [FULL, HYBRID], ids=["full", "hybrid"])
def test_every_byte_of_prompts_of_embeddings_is_right(setup: Setup) -> None:
    changes = [[], [140], [100, 120], [60], [33], [17], [5]]
    prompts = [embedded(changed, is_token) for changed in changes for is_token in MIXED.values()]
    shuffled(prompts, setup)


# ---- layers that share a KV cache

SHARING = {
    "full": replace(FULL, shared_layers=3),
    "hybrid": replace(HYBRID, shared_layers=4),
    "packed": replace(HYBRID, shared_layers=4, layout="BLHNC"),
    "two ranks": replace(FULL, shared_layers=3, world_size=2, extra={"cpu_bytes_to_use": "1MiB"}),
    "canonical": replace(
        FULL,
        shared_layers=3,
        heads=4,
        world_size=2,
        extra={"cpu_bytes_to_use": "2MiB", "canonical_layout": True},
    ),
}


@pytest.mark.parametrize("kind", SHARING)
def test_layers_without_their_own_cache_add_no_bytes(kind: str) -> None:
    setup = SHARING[kind]
    sizes = []
    for each in (setup, replace(setup, shared_layers=0)):
        with running(each) as engine:
            region = engine.manager._cache.stats()
            groups = [
                sorted(group.layer_names) for group in engine.ranks[0][1].connector_worker.spec.config.groups
            ]
            sizes.append((groups, region))
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("kind", SHARING)
def test_every_byte_is_right_where_layers_share_a_cache(kind: str, tmp_path: Path) -> None:
    setup = with_disk(SHARING[kind], tmp_path / "root", max_bytes="64MiB")
    live(setup, 11, 200, Rates(reset=0))
    whole: Any = None
    with running(setup) as engine:
        assert ask(engine, (text(), Inputs())) == 0
        assert ask(engine, (text(), Inputs())) == 144
    with running(setup, engine.model_dir) as after:
        whole = ask(after, (text(), Inputs()))
    assert whole == 144
