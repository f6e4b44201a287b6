# SPDX-License-Identifier: Apache-2.0
"""How much a relative error of keys and values changes the output of a model. Needs torch and transformers.

For small errors that are independent of the values, the expected KL divergence of the next-token
distributions is half the sum of the error's variances times the diagonal of the Fisher information. Its
diagonal is the mean square of the gradient of log probabilities of tokens that are drawn from the model's own
distribution. One backward pass gives it for all layers, heads and channels.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kv_offload.calibration import BLOCK, ChannelStatistics

# As the encoder (refine_bounds in csrc/record/lossy_section.cc): of each TILE tokens, those that are smaller
# than the mean by more than NEAR octaves have an error that is lowered by the cube of the rest, and larger
# ones by the power 3/4.
_TILE = 16
_NEAR = 0.5
# Of the magnitudes of a channel: between the two largest of 512 tokens.
_PEAK_QUANTILE = 0.999

Heads = list[ChannelStatistics]  # by head


def load_model(name: str, revision: str | None, dtype: str, trust_remote_code: bool) -> tuple[Any, Any]:
    """Loads a causal language model and its tokenizer, from a directory or from the hub.

    Raises ImportError without torch or transformers, and ValueError if transformers cannot load them.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = Path(name).expanduser()
    place = str(path) if path.exists() else name
    common: dict[str, Any] = {"revision": revision or "main", "trust_remote_code": trust_remote_code}
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, **common)
        model = AutoModelForCausalLM.from_pretrained(place, dtype=getattr(torch, dtype), **common)
    except Exception as error:  # of any library that transformers uses
        raise ValueError(f"transformers cannot load {name}: {_reason(error)}") from error
    return model.eval(), tokenizer


def channel_statistics(
    model: Any,
    segments: Sequence[Sequence[int]],
    prefix: int,
    *,
    draws: int = 3,
    progress: Callable[[int], None] = lambda done: None,
) -> list[tuple[Heads, Heads]]:
    """Returns the statistics of keys and of values by layer and head, with errors that are lowered by the
    sizes of tokens as by the encoder.

    ``model``: a causal language model of transformers. ``segments``: lists of token ids. The cache of their
    first ``prefix`` tokens is disturbed, and the others are evaluated. ``draws``: of tokens from each
    distribution. Calls progress(segments done). Raises ValueError if the model has no plain cache of keys and
    values per head.
    """
    import torch

    for parameter in model.parameters():
        parameter.requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    totals: list[Any] = []  # of keys and of values in turn: [sensitivity, peak][head][channel]
    for done, tokens in enumerate(segments, 1):
        ids = torch.tensor([list(tokens)])
        try:
            layers = _cache_of(model, ids[:, :prefix])
            found = _of_segment(model, layers, ids[:, prefix:], draws, generator)
        except ValueError:
            raise
        except Exception as error:  # of the model's own code, for example with layers of states
            raise ValueError(
                f"it does not run with a plain cache of keys and values ({_reason(error)})"
            ) from error
        totals = [total + more for total, more in zip(totals or [0] * len(found), found, strict=True)]
        progress(done)
    means = [
        [ChannelStatistics(*head) for head in (total / len(segments)).transpose(0, 1).tolist()]
        for total in totals
    ]
    return list(zip(means[::2], means[1::2], strict=True))


def _cache_of(model: Any, ids: Any) -> list[tuple[Any, Any]]:
    """Returns keys and values of all layers, [1, head, token, channel] each."""
    import torch
    from transformers import DynamicCache

    cache = DynamicCache()
    with torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    layers = [(getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in cache.layers]
    for keys, values in layers:
        if keys is None or values is None or keys.dim() != 4 or keys.shape[2] != ids.shape[1]:
            raise ValueError("a layer has no keys and values per head and token")
    if not layers:
        raise ValueError("the model caches no keys and values")
    return layers


def _of_segment(
    model: Any, layers: list[tuple[Any, Any]], rest: Any, draws: int, generator: Any
) -> list[Any]:
    import torch
    from transformers import DynamicCache

    leaves = [each.detach().clone().requires_grad_() for layer in layers for each in layer]
    cache = DynamicCache()
    for number in range(len(layers)):
        # Each layer appends to these, so the cache must not hold the leaves themselves.
        cache.update(leaves[2 * number] * 1, leaves[2 * number + 1] * 1, number)
    logits = model(rest, past_key_values=cache).logits[0].float()
    log_probabilities = torch.log_softmax(logits, -1)
    squares = [torch.zeros(leaf.shape) for leaf in leaves]
    for draw in range(draws):
        drawn = torch.multinomial(log_probabilities.detach().exp(), 1, generator=generator)
        chosen = log_probabilities.gather(1, drawn).sum()
        for square, gradient in zip(
            squares, torch.autograd.grad(chosen, leaves, retain_graph=draw + 1 < draws), strict=True
        ):
            square += gradient.float() ** 2
    tokens = draws * rest.shape[1]
    return [
        _statistics(leaf.detach().float()[0], square[0] / tokens)
        for leaf, square in zip(leaves, squares, strict=True)
    ]


def _statistics(numbers: Any, information: Any) -> Any:
    """Returns [sensitivity, peak][head][channel] for numbers and information by head, token and channel.

    The sensitivity is half the information times the variance of a relative error of 1, lowered as by the
    encoder.
    """
    import torch

    blocks = []
    for begin in range(0, numbers.shape[2], BLOCK):
        part = numbers[:, :, begin : begin + BLOCK]
        variance = (part**2).mean(-1)
        lowered = variance * _lowered(variance) ** 2
        sensitivity = 0.5 * (lowered[..., None] * information[:, :, begin : begin + BLOCK]).sum(1)
        norm = (variance * part.shape[-1]).sqrt().clamp_min(torch.finfo(part.dtype).tiny)
        peak = torch.quantile(part.abs() / norm[..., None], _PEAK_QUANTILE, dim=1)
        blocks.append(torch.stack([sensitivity, peak]))
    return torch.cat(blocks, -1)


def _lowered(variance: Any) -> Any:
    """Returns [head, token]: by how much the encoder multiplies the bound of a token with this variance."""
    import torch

    # Tokens of zeros do not count.
    octaves = torch.where(variance > 0, variance.log2() / 2, torch.nan)
    larger = torch.cat([part - part.nanmean(1, keepdim=True) for part in octaves.split(_TILE, 1)], 1)
    return torch.exp2(3 * (larger + _NEAR).clamp_max(0) - 0.75 * larger.clamp_min(0)).nan_to_num(1.0)


def _reason(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
