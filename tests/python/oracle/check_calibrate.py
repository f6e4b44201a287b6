# SPDX-License-Identifier: Apache-2.0
"""Run by test_calibration.py in a process that has imported torch and transformers: ``kv-offload calibrate``,
and the sensitivities that it computes."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import adapter
import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

adapter.use_specs()

from kv_offload.specs import identity  # noqa: E402

from kv_offload.calibration import Calibration, HeadFactors, LayerFactors  # noqa: E402
from kv_offload.cli import app, calibrate_command  # noqa: E402
from kv_offload.model_identity import model_identity  # noqa: E402
from kv_offload.sensitivity import _lowered, channel_statistics  # noqa: E402

MODEL = {"name": "org/model", "revision": "abc"}
SEGMENT = calibrate_command.PREFIX + calibrate_command.EVALUATED


def tiny_model() -> Any:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
    )
    model = LlamaForCausalLM(config).eval()
    for layer in model.model.layers:  # attention that depends on its keys
        layer.self_attn.q_proj.weight.data *= 8
        layer.self_attn.k_proj.weight.data *= 8
        layer.self_attn.v_proj.weight.data *= 4
        layer.self_attn.o_proj.weight.data *= 8
    model.lm_head.weight.data *= 20
    return model


def test_sensitivities_predict_the_divergence() -> None:
    model = tiny_model()
    ids = torch.randint(0, 64, (1, 160), generator=torch.Generator().manual_seed(5))
    found = channel_statistics(model, ids.tolist(), 96, draws=16)
    assert [len(heads) for layer in found for heads in layer] == [2] * 4
    assert {len(each) for layer in found for heads in layer for head in heads for each in head} == {64}

    def log_probabilities(
        layer: int, kind: int, head: int, error: float, seed: int, channels: list[int]
    ) -> Any:
        cache = DynamicCache()
        with torch.no_grad():
            model(ids[:, :96], past_key_values=cache)
            numbers = (cache.layers[layer].keys, cache.layers[layer].values)[kind][0, head]
            noise = torch.randn(numbers.shape, generator=torch.Generator().manual_seed(seed))
            noise *= error * numbers.norm(dim=-1, keepdim=True) / 8
            numbers[:, channels] += noise[:, channels]
            return torch.log_softmax(model(ids[:, 96:], past_key_values=cache).logits[0], -1)

    everything = list(range(64))
    exact = log_probabilities(0, 0, 0, 0, 0, everything)
    for layer, kind, head in ((0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 1, 0)):
        error = 0.02
        known = found[layer][kind][head].sensitivities
        order = sorted(everything, key=lambda channel: known[channel])
        for channels in (everything, order[:32], order[32:]):
            divergences = [
                float((exact.exp() * (exact - changed)).sum(-1).mean())
                for changed in (
                    log_probabilities(layer, kind, head, error, seed, channels) for seed in range(6)
                )
            ]
            expected = sum(known[channel] for channel in channels)
            ratio = sum(divergences) / len(divergences) / error**2 / expected
            assert 0.6 < ratio < 1.6, (layer, kind, head, len(channels), ratio)
        assert sum(known[channel] for channel in order[32:]) > 1.2 * sum(
            known[channel] for channel in order[:32]
        )


def test_peaks_are_the_largest_parts_of_the_norm() -> None:
    model = tiny_model()
    ids = torch.randint(0, 64, (1, 160), generator=torch.Generator().manual_seed(5))
    (first, _) = channel_statistics(model, ids.tolist(), 96, draws=1)
    cache = DynamicCache()
    with torch.no_grad():
        model(ids[:, :96], past_key_values=cache)
    keys = cache.layers[0].keys[0, 1]
    largest = (keys.abs() / keys.norm(dim=-1, keepdim=True)).amax(0)
    peaks = torch.tensor(first[0][1].peaks)
    assert (peaks <= largest + 1e-6).all()
    assert (peaks >= 0.9 * largest).all()


def test_the_errors_of_small_tokens_are_lowered_as_by_the_encoder() -> None:
    sizes = torch.ones(1, 40)
    sizes[0, 3] = 1 / 8
    sizes[0, 20] = 0.8  # less than half an octave below the mean
    sizes[0, 21] = 4  # above the mean
    sizes[0, 32:] = 1 / 8  # all tokens of the last tile, which is not whole
    sizes[0, 33] = 0
    lowered = _lowered(sizes**2)
    expected = torch.ones(1, 40)
    mean = 3 / 16
    expected[0, :16] = 2.0 ** (-0.75 * mean)
    expected[0, 3] = 2.0 ** (3 * (0.5 - 3 + mean))
    mean = (2 + math.log2(0.8)) / 16
    expected[0, 20] = 1
    expected[0, 21] = 2.0 ** (-0.75 * (2 - mean))
    assert torch.allclose(lowered, expected, rtol=1e-4)


class Tokenizer:
    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(each) % 64 for each in text]}


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["calibrate", *words])


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model instead of one that transformers loads."""
    monkeypatch.setattr(calibrate_command, "_loaded", lambda *_: (tiny_model(), Tokenizer()))
    monkeypatch.setattr("kv_offload.model_identity.model_identity", lambda *_, **__: dict(MODEL))


@pytest.mark.usefixtures("loaded")
def test_the_command_writes_a_calibration_of_the_model(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    result = run("org/model", "-o", str(path), "--segments", "2", "--json")
    assert result.exit_code == 0, result.output
    found = Calibration.read(path)
    assert found.model == MODEL
    assert json.loads(result.output)["digest"] == found.digest
    assert [(layer.key_size, len(layer.keys)) for layer in found.layers] == [(64, 2)] * 2
    assert found.made_of["tokens"] == 2 * SEGMENT
    assert len({head.weighted for layer in found.layers for head in layer.keys}) > 1
    assert len({each for layer in found.layers for head in layer.keys for each in head.weights}) > 1


@pytest.mark.usefixtures("loaded")
def test_wrong_use_is_explained_and_writes_nothing(tmp_path: Path) -> None:
    output = tmp_path / "calibration.json"
    short, binary = tmp_path / "short.txt", tmp_path / "binary"
    short.write_text("too short " * 100)
    binary.write_bytes(b"\xff\xfe")
    for words, status, reason in (
        (
            ["--text", str(short)],
            2,
            "1,000 characters; 2 segments of 768 tokens need about 12,288",
        ),
        (["--text", str(binary)], 2, "not UTF-8"),
        (["--text", str(tmp_path / "missing")], 2, "No such file or directory"),
        (["--dtype", "int8"], 2, "possible: float32, bfloat16 or float16"),
    ):
        result = run("org/model", "-o", str(output), *words)
        assert result.exit_code == status, result.output
        assert reason in " ".join(result.output.split())
    result = run("org/model", "-o", str(tmp_path / "no" / "file"))
    assert result.exit_code == 2
    assert "the directory does not exist" in " ".join(result.output.split())
    result = run("org/model", "-o", str(tmp_path))
    assert result.exit_code == 2
    assert "is a directory; name a file" in " ".join(result.output.split())
    assert not output.exists()


@pytest.mark.usefixtures("loaded")
def test_a_calibration_in_the_directory_of_the_model_is_refused(tmp_path: Path) -> None:
    # It would change the identity of the weights, and with it the namespace of all servers.
    model, link = tmp_path / "model", tmp_path / "link"
    (model / "inner").mkdir(parents=True)
    link.symlink_to(model)
    for directory in (model, model / "inner", link):
        result = run(str(model), "-o", str(directory / "calibration.json"))
        assert result.exit_code == 2, result.output
        assert "is in the directory of the model" in " ".join(result.output.split())
    assert not list(model.rglob("*.json"))


def measured(_: Any, __: Any, identity: dict[str, Any], *___: Any, **____: Any) -> Calibration:
    """A calibration without a measurement."""
    head = HeadFactors((1.0,), (1.0,), (0,) * 64)
    return Calibration(identity, (LayerFactors((head,), (head,)),), {})


def test_the_identity_has_the_code_of_other_repositories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SimpleNamespace(auto_map={"AutoModelForCausalLM": "org/code--modeling.Model"})
    loaded = SimpleNamespace(config=config)
    monkeypatch.setattr(calibrate_command, "_loaded", lambda *_: (loaded, Tokenizer()))
    monkeypatch.setattr(calibrate_command, "_measured", measured)
    monkeypatch.setattr("kv_offload.model_identity._hub_commit", lambda name, *_: f"commit of {name}")
    path = tmp_path / "calibration.json"
    result = run("org/model", "-o", str(path), "--trust-remote-code")
    assert result.exit_code == 0, result.output
    served = identity._remote_code(SimpleNamespace(trust_remote_code=True, hf_config=config))
    assert served == ["org/code"]
    Calibration.read(path).refuse_other_model(model_identity("org/model", code=served))


def test_the_identity_is_that_of_the_loaded_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    revisions = ["old"]

    def load(*_: Any) -> tuple[Any, Any]:
        revisions.append("new")  # loading downloads a newer revision
        return None, Tokenizer()

    monkeypatch.setattr(calibrate_command, "_loaded", load)
    monkeypatch.setattr(calibrate_command, "_measured", measured)
    monkeypatch.setattr(
        "kv_offload.model_identity.model_identity", lambda *_, **__: {"name": "x", "revision": revisions[-1]}
    )
    path = tmp_path / "calibration.json"
    result = run("x", "-o", str(path), "--segments", "2")
    assert result.exit_code == 0, result.output
    assert Calibration.read(path).model == {"name": "x", "revision": "new"}


def test_a_model_that_cannot_be_loaded_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama"}')
    result = run(str(model), "-o", str(tmp_path / "calibration.json"))
    assert result.exit_code == 1
    assert f"transformers cannot load {model}" in " ".join(result.output.split())


@pytest.mark.usefixtures("loaded")
def test_weights_without_an_identity_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "kv_offload.model_identity.model_identity", lambda *_, **__: {"name": "x", "revision": "unknown"}
    )
    result = run("x", "-o", str(tmp_path / "calibration.json"))
    assert result.exit_code == 1
    assert "the weights cannot be identified" in " ".join(result.output.split())


def without_states(cache: Any) -> None:
    """A model that ignores the cache that it is given, such as Mamba."""


def with_a_state(cache: Any) -> None:
    cache.layers.append(SimpleNamespace(keys=None, values=None))


def with_other_layers(cache: Any) -> None:
    """A hybrid model: it expects layers of states in the cache."""
    cache.layers[0]


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (without_states, "the model caches no keys and values"),
        (with_a_state, "no keys and values per head and token"),
        (with_other_layers, r"not run with a plain cache of keys and values \(list index out of range\)"),
    ],
)
def test_a_model_without_keys_and_values_per_head_is_refused(
    forward: Callable[[Any], None], reason: str
) -> None:
    class Model:
        def parameters(self) -> list[Any]:
            return []

        def __call__(self, ids: Any, past_key_values: Any, **_: Any) -> None:
            forward(past_key_values)

    with pytest.raises(ValueError, match=reason):
        channel_statistics(Model(), [[0] * 8], 4)
