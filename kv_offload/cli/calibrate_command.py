# SPDX-License-Identifier: Apache-2.0
"""``kv-offload calibrate MODEL``: measures how sensitive a model's KV heads are to lossy records."""

import hashlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kv_offload.cli.terminal import PROBLEM, USAGE, echo, fail, plain_errors, print_json

if TYPE_CHECKING:
    from kv_offload.calibration import Calibration

PREFIX, EVALUATED = 512, 256  # tokens of a segment
_FEWEST_SEGMENTS = 2
_CHARACTERS_PER_TOKEN = 8  # at most, of nearly all texts


@plain_errors
def calibrate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A model directory, or a name on the Hugging Face hub.", show_default=False
        ),
    ],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="FILE", help="Where to write the calibration."),
    ] = Path("calibration.json"),
    text: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Text like that of your requests, in UTF-8. Default: this package's source code.",
            show_default=False,
        ),
    ] = None,
    segments: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=_FEWEST_SEGMENTS,
            max=1000,
            help=f"Number of segments of {PREFIX + EVALUATED} tokens; fewer if the text is shorter.",
        ),
    ] = 6,
    revision: Annotated[
        str | None,
        typer.Option(metavar="REVISION", help="Same as vLLM's --revision.", show_default=False),
    ] = None,
    dtype: Annotated[
        str, typer.Option(metavar="DTYPE", help="Precision of the computation: float32, bfloat16 or float16.")
    ] = "float32",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Same as vLLM's option of this name.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of sentences.")] = False,
) -> None:
    """Calibrate lossy compression for a model; needs torch.

    Measures how much errors in the keys and values of each layer and KV head change the model's next-token
    probabilities, and writes factors for the error bound of "compress": "lossy:E". Set "calibration" of the
    lossy tier to the file. Runs the model with transformers on the CPU, forwards and backwards; this takes
    minutes, and as much memory as the weights in --dtype. The file is valid for these weights only.

    \b
    Examples:
      kv-offload calibrate /models/Llama-3.1-8B --dtype bfloat16 -o llama.calibration.json
      kv-offload calibrate Qwen/Qwen3-0.6B --text prompts.txt

    Exit status: 0 written; 1 the model or the text cannot be used; 2 wrong usage.
    """
    if dtype not in ("float32", "bfloat16", "float16"):
        fail(f"--dtype is {dtype!r}; possible: float32, bfloat16 or float16", USAGE)
    _check_output(output, model)
    from kv_offload.model_identity import code_repositories, model_identity, weights_problem

    content = _own_source() if text is None else _text_of(text)
    began = time.monotonic()
    loaded, tokenizer = _loaded(model, revision, dtype, trust_remote_code)
    # After loading, which may download the model or a newer revision of it.
    code = code_repositories(getattr(loaded, "config", None)) if trust_remote_code else []
    identity = model_identity(model, revision, code=code)
    if problem := weights_problem(identity):
        fail(f"the weights cannot be identified: {problem}", PROBLEM)
    parts = _segments(tokenizer, content, segments)
    made_of = {
        "text": "built-in" if text is None else text.name,
        "text_sha256": hashlib.sha256(content.encode()).hexdigest(),
        "tokens": len(parts) * (PREFIX + EVALUATED),
        "dtype": dtype,
    }
    try:
        calibration = _measured(loaded, parts, identity, made_of, quiet=as_json)
    except ValueError as error:
        fail(f"{model} cannot be calibrated: {error}", PROBLEM)
    calibration.write(output)
    seconds = time.monotonic() - began
    if as_json:
        print_json(
            {"path": str(output), "digest": calibration.digest, "seconds": round(seconds, 1), **made_of}
        )
        return
    factors = sorted(
        each
        for layer in calibration.layers
        for head in (*layer.keys, *layer.values)
        for each in head.weighted
    )
    echo(
        f"{output}: {len(calibration.layers)} layers, factors of the bound from {factors[0]:.3g} to "
        f"{factors[-1]:.3g} (median {factors[len(factors) // 2]:.3g}), in {seconds:.0f} s. Set "
        f'"compress": "lossy:0.24" and "calibration": "{output.absolute()}" for one tier'
    )


def _check_output(output: Path, model: str) -> None:
    directory = output.absolute().parent
    if not directory.is_dir():
        fail(f"--output {output}: the directory does not exist", USAGE)
    if output.is_dir():
        fail(f"--output {output}: is a directory; name a file", USAGE)
    if not os.access(directory, os.W_OK):
        fail(f"--output {output}: the directory is not writable", USAGE)
    weights = Path(model).expanduser()
    if weights.is_dir() and directory.resolve().is_relative_to(weights.resolve()):
        fail(
            f"--output {output}: is in the directory of the model, whose JSON files are part of the identity "
            "of the weights; choose another directory",
            USAGE,
        )


def _own_source() -> str:
    """Returns code and English text that every installation has."""
    root = Path(__file__).parent.parent
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted(root.glob("*.py")))


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        fail(f"--text {path}: {error.strerror}", USAGE)
    except UnicodeDecodeError:
        fail(f"--text {path}: not UTF-8", USAGE)


def _loaded(name: str, revision: str | None, dtype: str, trust_remote_code: bool) -> tuple[Any, Any]:
    """Returns the model and its tokenizer."""
    from kv_offload.sensitivity import load_model

    try:
        return load_model(name, revision, dtype, trust_remote_code)
    except ImportError as error:
        fail(f"{error.name} is not installed; run this command in the environment of vLLM", PROBLEM)
    except ValueError as error:
        fail(str(error), PROBLEM)


def _segments(tokenizer: Any, content: str, most: int) -> list[list[int]]:
    """Returns the tokens of parts of the text, evenly distributed over it."""
    size = PREFIX + EVALUATED
    # Parts of a long text, so that tokenizing all of it is not needed.
    wanted = size * _CHARACTERS_PER_TOKEN
    count = min(most, max(1, len(content) // wanted))
    parts = []
    for number in range(count):
        begin = (len(content) - wanted) * number // max(1, count - 1) if count > 1 else 0
        ids = tokenizer(content[begin : begin + wanted])["input_ids"][:size]
        if len(ids) == size:
            parts.append(ids)
    if len(parts) < _FEWEST_SEGMENTS:
        fail(
            f"the text has {len(content):,} characters; {_FEWEST_SEGMENTS} segments of {size} tokens need "
            f"about {_FEWEST_SEGMENTS * wanted:,}",
            USAGE,
        )
    return parts


def _measured(
    loaded: Any, parts: list[list[int]], identity: dict[str, Any], made_of: dict[str, Any], quiet: bool
) -> "Calibration":
    """Raises ValueError if the model has no cache of keys and values per head."""
    from kv_offload import __version__
    from kv_offload.calibration import Calibration
    from kv_offload.sensitivity import channel_statistics

    def show(done: int) -> None:
        if not quiet:
            echo(f"segment {done} of {len(parts)}")

    found = channel_statistics(loaded, parts, PREFIX, progress=show)
    return Calibration.of_statistics(identity, found, {**made_of, "kv_offload": __version__})
