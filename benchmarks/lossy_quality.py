# SPDX-License-Identifier: Apache-2.0
"""Measures what lossy records change in the answers of a small language model.

    python benchmarks/lossy_quality.py --build build/cpp

The model is SmolLM2-135M-Instruct, as in lossy_curves.py, which names the packages. The KV cache of a prompt
is encoded and restored with each pair of bounds by the C++ codec, in records of 1.8 MiB in vLLM's layout
LBNHC. With ``--calibrated`` also with a bound that a calibration on the other text lowers. The baseline is
the exact cache in bfloat16. Decoding is greedy; arithmetic is float32.

- Continuations: 1,000 distinct prefixes of 129 tokens, half of them from this repository's documentation,
  half from its C++ sources. The cache of 128 tokens is restored; the model then evaluates the last token of
  the prefix and continues. Reported: the number of prefixes with the same next token, of those with the same
  16 tokens, and the share of all tokens before the first difference.
- Needle: a sentence with a number of five digits, at several depths of a long prompt of documentation. The
  restored cache includes the question, except its last token. Only prompts that the exact cache answers
  correctly count.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from lossy_curves import TEXTS, TILE, Cache, Model, codec_restores
from payload_codec import text_of
from reporting import describe_machine, echo, write_results


class Bounds(NamedTuple):
    keys: float
    values: float
    calibrated: bool = False  # lowered by the factors of a calibration on the other text

    @property
    def name(self) -> str:
        return f"{self.keys}:{self.values}{' calibrated' if self.calibrated else ''}"


BOUNDS = [Bounds(0.02, 0.02), Bounds(0.05, 0.05), Bounds(0.05, 0.125), Bounds(0.1, 0.1)]
PREFIX = 128  # tokens in the cache of a continuation
TOKENS = 16  # of a continuation
BATCH = 25  # prefixes evaluated together
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
NEEDLE = "\n\nThe secret number of the vault is {}. Remember it.\n\n"
QUESTION = "\n\nQuestion: What is the secret number of the vault?\nAnswer: The secret number of the vault is"
DIGITS = 5


def interval(successes: int, of: int) -> tuple[float, float]:
    """Returns the 95% Wilson interval of a share."""
    if of == 0:
        return 0.0, 1.0
    z, share = 1.96, successes / of
    centre = share + z * z / (2 * of)
    half = z * math.sqrt(share * (1 - share) / of + z * z / (4 * of * of))
    return (centre - half) / (1 + z * z / of), (centre + half) / (1 + z * z / of)


def joined(caches: np.ndarray) -> Cache:
    """Joins the caches of a batch, [layer][kind][sequence][head][token][channel], one after another."""
    layers, kinds, _, heads, _, width = caches.shape
    return np.ascontiguousarray(caches.transpose(0, 1, 3, 2, 4, 5).reshape(layers, kinds, heads, -1, width))


def parted(cache: Cache, sequences: int) -> np.ndarray:
    """The inverse of ``joined``."""
    layers, kinds, heads, _, width = cache.shape
    parts = cache.reshape(layers, kinds, heads, sequences, -1, width)
    return np.ascontiguousarray(parts.transpose(0, 1, 3, 2, 4, 5))


class Codec:
    """Encodes and restores the caches of one text with each of ``bounds``."""

    def __init__(self, program: Path, model: Model, text: str, bounds: Sequence[Bounds]) -> None:
        self._program = program
        self.bounds = bounds
        others = [place for name, place in TEXTS.items() if name != text]
        self._calibration = model.calibration(others[0]) if any(each.calibrated for each in bounds) else None

    def restores(self, cache: Cache, bounds: Bounds) -> tuple[Cache, float]:
        """Returns the restored cache and the ratio of its records."""
        calibration = self._calibration if bounds.calibrated else None
        restored, figures = codec_restores(
            self._program, cache, bounds.keys, bounds.values, calibration=calibration
        )
        return restored, figures["ratio"]


class Agreement:
    """Compares the continuations of one text with those of the exact cache, for all bounds of its codec."""

    def __init__(self, text: str, codec: Codec) -> None:
        self.text = text
        self._codec = codec
        self.alike: dict[Bounds, list[int]] = {bounds: [] for bounds in codec.bounds}
        self.ratios: dict[Bounds, list[float]] = {bounds: [] for bounds in codec.bounds}

    def add(self, model: Model, batch: Any) -> None:
        """Adds prefixes, [sequence][PREFIX + 1]."""
        exact = model.caches_of(batch[:, :PREFIX])
        whole = joined(exact)
        versions = [exact]
        for bounds in self.alike:
            restored, ratio = self._codec.restores(whole, bounds)
            versions.append(parted(restored, len(batch)))
            self.ratios[bounds].append(ratio)
        # All versions in one batch, so that they are computed alike.
        last = batch[:, PREFIX:].repeat(len(versions), 1)
        found = model.continued(last, np.concatenate(versions, 2), TOKENS)
        found = found.reshape(len(versions), len(batch), TOKENS)
        for bounds, tokens in zip(self.alike, found[1:], strict=True):
            differs = np.concatenate([tokens != found[0], np.ones((len(batch), 1), bool)], 1)
            self.alike[bounds] += differs.argmax(1).tolist()  # tokens before the first difference

    def state(self) -> dict[str, Any]:
        """Returns all results for ``restore``, as JSON can hold them."""
        return {bounds.name: [self.alike[bounds], self.ratios[bounds]] for bounds in self.alike}

    def restore(self, state: dict[str, Any]) -> None:
        """Takes the results of an interrupted run."""
        for bounds in self.alike:
            self.alike[bounds], self.ratios[bounds] = state[bounds.name]

    def rows(self) -> list[dict[str, Any]]:
        """Returns the results for all bounds."""
        rows = []
        for bounds in self.alike:
            alike = np.array(self.alike[bounds])
            row: dict[str, Any] = {"text": self.text} | bounds._asdict() | {"prefixes": len(alike)}
            row |= {"ratio": float(np.mean(self.ratios[bounds]))}
            row |= {"same_first": int((alike > 0).sum()), "same_all": int((alike == TOKENS).sum())}
            rows.append(row | {"same_tokens": int(alike.sum())})
        return rows


def continuations(
    codecs: dict[str, Codec], model: Model, count: int, progress: Path | None
) -> list[dict[str, Any]]:
    """Returns the agreement with the exact cache for each text and all bounds.

    ``progress`` receives the results after each batch. Begins after those that it has for the same prefixes
    and bounds.
    """
    sequences = count // len(TEXTS)
    texts = {
        text: model.encode(text_of(*place), sequences * (PREFIX + 1)).reshape(sequences, PREFIX + 1)
        for text, place in TEXTS.items()
    }
    for ids in texts.values():
        assert len({tuple(each) for each in ids.tolist()}) == sequences, "the prefixes are distinct"
    found = {text: Agreement(text, codecs[text]) for text in texts}
    work = hashlib.sha256(b"".join(ids.numpy().tobytes() for ids in texts.values()))
    work.update(repr([codec.bounds for codec in codecs.values()]).encode())
    prefixes = work.hexdigest()
    saved = json.loads(progress.read_text()) if progress and progress.exists() else {}
    done = saved["done"] if saved.get("prefixes") == prefixes else 0
    for text, agreement in found.items():
        if done:
            agreement.restore(saved["found"][text])
    for begin in range(done, sequences, BATCH):
        for text, ids in texts.items():
            found[text].add(model, ids[begin : begin + BATCH])
        for row in (row for agreement in found.values() for row in agreement.rows()):
            echo(
                f"    {row['text']}, {name_of(row)}: ratio {row['ratio']:.2f}, same next "
                f"token {row['same_first']} of {row['prefixes']}, same {TOKENS} tokens {row['same_all']}, "
                f"tokens before the first difference {row['same_tokens'] / row['prefixes'] / TOKENS:.3f}"
            )
        if progress:
            results = {text: agreement.state() for text, agreement in found.items()}
            now = {"prefixes": prefixes, "done": begin + BATCH, "found": results}
            written = progress.with_name(progress.name + ".new")
            written.write_text(json.dumps(now))
            written.replace(progress)
    return [row for agreement in found.values() for row in agreement.rows()]


def needle_prompt(model: Model, filler: Sequence[int], length: int, depth: float, number: str) -> list[int]:
    """Returns a prompt of ``length`` tokens: filler with the number at ``depth``, then a question."""
    needle = list(model.tokens_of(NEEDLE.format(number)))
    question = list(model.tokens_of(QUESTION))
    room = length - len(needle) - len(question)
    at = int(depth * room)
    return [*filler[:at], *needle, *filler[at:room], *question]


def needles(codec: Codec, model: Model, length: int, per_depth: int) -> list[dict[str, Any]]:
    """Returns for each depth and all bounds how many of the numbers are found."""
    draw = random.Random(length)
    filler = model.encode(text_of(*TEXTS["prose"]), 3 * length)[0].tolist()
    rows = []
    for depth in DEPTHS:
        found = {bounds: 0 for bounds in codec.bounds}
        counted, prompts = 0, 0
        for _ in range(per_depth):
            number = str(draw.randrange(10 ** (DIGITS - 1), 10**DIGITS))
            begin = draw.randrange(2 * length)
            # One token more than whole blocks: the last one is evaluated.
            cached = (length - 1) // TILE * TILE
            ids = needle_prompt(model, filler[begin:], cached + 1, depth, number)
            batch = model.tensor_of([ids])
            exact = model.caches_of(batch[:, :cached])
            prompts += 1
            if not answers(model, batch[:, cached:], exact, number):
                continue
            counted += 1
            for bounds in codec.bounds:
                restored, _ = codec.restores(exact[:, :, 0], bounds)
                found[bounds] += answers(model, batch[:, cached:], restored[:, :, None], number)
        for bounds, right in found.items():
            rows.append(bounds._asdict() | {"length": length, "depth": depth})
            rows[-1] |= {"prompts": prompts, "counted": counted, "found": right}
        echo(
            f"    {length} tokens, depth {depth}: the exact cache finds {counted} of {prompts}; restored: "
            + ", ".join(f"{bounds.name} {right}" for bounds, right in found.items())
        )
    return rows


def name_of(row: dict[str, Any]) -> str:
    """Returns the bounds of a row of results."""
    return Bounds(row["keys"], row["values"], row["calibrated"]).name


def answers(model: Model, last: Any, caches: np.ndarray, number: str) -> bool:
    """Returns whether the model continues with the number."""
    expected = model.tokens_of(f" {number}")
    return bool(model.continued(last, caches, len(expected))[0].tolist() == expected)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--build", type=Path, required=True, help="with the program payload_codec: build/cpp")
    parser.add_argument("--prefixes", type=int, default=1000, help="a multiple of 50; 0: no continuations")
    parser.add_argument(
        "--needles", default="2048:3,8192:1", help="tokens:numbers per depth, comma-separated; '': none"
    )
    parser.add_argument(
        "--progress", type=Path, help="a file from which an interrupted run of the continuations goes on"
    )
    parser.add_argument("--bounds", help="KEYS:VALUES, comma-separated, instead of four pairs; '': none")
    parser.add_argument("--calibrated", type=float, metavar="BOUND", help="also this bound, calibrated")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--try-out", action="store_true", help="nothing is written")
    options = parser.parse_args()
    import torch

    torch.set_num_threads(options.threads)
    echo(describe_machine()["text"])
    program = options.build / "payload_codec"
    model = Model("smollm2")
    bounds = list(BOUNDS)
    if options.bounds is not None:
        pairs = [pair.split(":") for pair in filter(None, options.bounds.split(","))]
        bounds = [Bounds(float(keys), float(values)) for keys, values in pairs]
    if options.calibrated:
        bounds.append(Bounds(options.calibrated, options.calibrated, True))
    codecs = {text: Codec(program, model, text, bounds) for text in TEXTS}
    began = time.process_time()
    hidden = []
    for pair in filter(None, options.needles.split(",")):
        length, per_depth = map(int, pair.split(":"))
        hidden += needles(codecs["prose"], model, length, per_depth)
    rows = continuations(codecs, model, options.prefixes, options.progress) if options.prefixes else []
    for each in bounds:
        total = [row for row in rows if name_of(row) == each.name]
        if total:
            count = sum(row["prefixes"] for row in total)
            right = sum(row["same_first"] for row in total)
            low, high = interval(right, count)
            echo(f"    {each.name}: same next token {right} of {count} (95%: {low:.3f} to {high:.3f})")
    echo(f"    {time.process_time() - began:.0f} s of CPU time")
    if options.try_out:
        return
    if rows:
        facts = {"model": model.name, "prefix": PREFIX + 1, "tokens": TOKENS}
        write_results(f"lossy_quality-continuations-{model.name}", facts | {"rows": rows})
    if hidden:
        write_results(f"lossy_quality-needles-{model.name}", {"model": model.name, "rows": hidden})


if __name__ == "__main__":
    main()
