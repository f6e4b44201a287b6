# SPDX-License-Identifier: Apache-2.0
"""The namespace id: equal exactly when the bytes have the same meaning."""

import dataclasses
import hashlib
import json
import shutil

import pytest

from kv_offload.model_identity import model_identity, weights_problem
from kv_offload.namespace import (
    GroupIdentity,
    NamespaceIdentity,
    hash_seed_is_random,
    other_namespaces,
    random_seed_warning,
    setting_text,
)

GROUP = GroupIdentity(group_id=0, tokens_per_block=16, num_layers=32, shard_bytes=(65536, 65536))
FACTS = NamespaceIdentity(
    model={"name": "org/model", "revision": "abc"},
    kv_dtype="bfloat16",
    kv_cache_layout="LBHNC",
    groups=(GROUP,),
    blocks_per_chunk=4,
    tokens_per_hash=16,
    hash_algorithm="sha256",
    hash_seed="00ff",
    tp_size=2,
    world_size=2,
    settings={"compute_dtype": "bfloat16", "platform": "cuda"},
)


def test_id_is_the_digest_of_the_canonical_json():
    assert FACTS.namespace_id() == hashlib.sha256(FACTS.canonical_json().encode()).digest()
    assert len(FACTS.namespace_id()) == 32
    assert FACTS.namespace_id().hex().startswith(FACTS.short_id())


def test_the_readable_json_has_the_same_content():
    assert json.loads(FACTS.readable_json()) == json.loads(FACTS.canonical_json())


def test_the_id_of_this_identity_never_changes():
    """Every record on every disk depends on it: change FORMAT_VERSION, not this number."""
    assert FACTS.short_id() == "fecf63d1bc71"


def test_the_canonical_layout_is_named_only_where_it_is_used():
    assert "canonical_layout" not in json.loads(FACTS.canonical_json())
    canonical = dataclasses.replace(FACTS, canonical_layout=1)
    assert json.loads(canonical.canonical_json())["canonical_layout"] == 1


CHANGES = {
    "model": {"name": "org/model", "revision": "abd"},
    "kv_dtype": "fp8",
    "kv_cache_layout": "BLHNC",
    "groups": (dataclasses.replace(GROUP, group_id=1),),
    "blocks_per_chunk": 8,
    "tokens_per_hash": 32,
    "hash_algorithm": "sha256_cbor",
    "hash_seed": "00fe",
    "tp_size": 1,
    "pp_size": 2,
    "pcp_size": 2,
    "dcp_size": 2,
    "world_size": 4,
    "replicated": True,
    "canonical_layout": 1,
    "settings": {"compute_dtype": "float16", "platform": "cuda"},
}


def test_every_field_is_tested():
    assert set(CHANGES) == {field.name for field in dataclasses.fields(NamespaceIdentity)}


@pytest.mark.parametrize("name", CHANGES)
def test_each_field_changes_the_id(name):
    assert dataclasses.replace(FACTS, **{name: CHANGES[name]}).namespace_id() != FACTS.namespace_id()


@pytest.mark.parametrize(
    ("name", "value"),
    [("group_id", 9), ("tokens_per_block", 32), ("num_layers", 31), ("shard_bytes", (65536, 65535))],
)
def test_each_field_of_a_group_changes_the_id(name, value):
    groups = (dataclasses.replace(GROUP, **{name: value}),)
    assert dataclasses.replace(FACTS, groups=groups).namespace_id() != FACTS.namespace_id()


def test_each_part_of_a_chunk_has_a_namespace_of_its_own():
    parts = [FACTS.with_part(part) for part in ("", "rank 0 of 2", "rank 1 of 2")]
    assert parts[0] == FACTS
    assert len({part.namespace_id() for part in parts}) == 3
    assert json.loads(parts[1].readable_json())["settings"]["part"] == "rank 0 of 2"


def test_an_identity_arrives_unchanged_at_another_host():
    text = json.dumps(dataclasses.asdict(FACTS))
    arrived = NamespaceIdentity.of_fields(json.loads(text))
    assert arrived == FACTS
    assert arrived.namespace_id() == FACTS.namespace_id()
    with pytest.raises(TypeError):
        NamespaceIdentity.of_fields({**json.loads(text), "unknown": 1})


def test_order_of_settings_does_not_matter():
    settings = dict(reversed(FACTS.settings.items()))
    assert dataclasses.replace(FACTS, settings=settings).namespace_id() == FACTS.namespace_id()


def test_floats_are_refused_by_name():
    facts = dataclasses.replace(FACTS, settings={"rope_theta": 1e6})
    with pytest.raises(TypeError, match=r"identity\.settings\.rope_theta is 1000000\.0"):
        facts.canonical_json()


def test_the_text_of_a_setting_is_stable():
    assert setting_text({"b": 1.5, "a": [1, "x"]}) == setting_text({"a": [1, "x"], "b": 1.5})


# ---- which weights


@pytest.fixture
def model(tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(
        json.dumps({"architectures": ["TinyForCausalLM"], "rope_theta": 1e4, "transformers_version": "5.1"})
    )
    (directory / "model-1.safetensors").write_bytes(bytes(range(256)) * 2048)  # 512 KiB
    (directory / "model-2.safetensors").write_bytes(b"second")
    (directory / "tokenizer.json").write_text("{}")
    return directory


def identity(directory):
    return model_identity(str(directory))


def test_a_copied_model_keeps_its_hits(model, tmp_path):
    before = identity(model)
    assert identity(shutil.copytree(model, tmp_path / "elsewhere")) == before
    shutil.move(model, tmp_path / "moved")
    assert identity(tmp_path / "moved") == before
    assert str(tmp_path) not in json.dumps(before)


def test_the_identity_describes_the_model(model):
    facts = identity(model)
    assert facts["architecture"] == "TinyForCausalLM"
    assert (facts["weight_files"], facts["weight_bytes"]) == (2, (512 << 10) + 6)


@pytest.mark.parametrize("offset", [0, 65535, (512 << 10) - 65536, (512 << 10) - 1])
def test_weights_saved_again_with_the_same_size_lose_their_hits(model, offset):
    before = identity(model)
    with (model / "model-1.safetensors").open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
    assert identity(model) != before


def change_config(model):
    (model / "config.json").write_text(json.dumps({"architectures": ["TinyForCausalLM"], "rope_theta": 1e6}))


@pytest.mark.parametrize(
    "change",
    [
        lambda model: (model / "model-2.safetensors").write_bytes(b"other!"),
        lambda model: (model / "model-2.safetensors").rename(model / "model-3.safetensors"),
        lambda model: (model / "model-2.safetensors").unlink(),
        lambda model: (model / "quantize_config.json").write_text("{}"),
        lambda model: (model / "preprocessor_config.json").write_text("{}"),
        lambda model: (model / "processor_config.json").write_text("{}"),
        lambda model: (model / "video_preprocessor_config.json").write_text("{}"),
        lambda model: (model / "modeling_tiny.py").write_text("pass"),
        change_config,
    ],
)
def test_other_weights_or_config_lose_their_hits(model, change):
    before = identity(model)
    change(model)
    assert identity(model) != before


@pytest.mark.parametrize(
    "change",
    [
        lambda model: (model / "tokenizer.json").write_text('{"a": 1}'),
        lambda model: (model / "README.md").write_text("read me"),
        lambda model: (model / "training_args.bin").write_text("x"),
        lambda model: (model / "config.json").write_text(
            '{"rope_theta": 10000.0, "_name_or_path": "/x",\n "architectures": ["TinyForCausalLM"]}'
        ),
    ],
)
def test_changes_that_affect_no_byte_keep_the_hits(model, change):
    before = identity(model)
    change(model)
    assert identity(model) == before


def test_a_single_file_can_be_a_model(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"gguf")
    assert model_identity(str(tmp_path / "model.gguf"))["weight_bytes"] == 4


def test_a_hub_name_is_identified_by_its_commit(tmp_path):
    references = tmp_path / "models--org--name" / "refs"
    references.mkdir(parents=True)
    (references / "main").write_text("c0ffee\n")
    named = {"name": "org/name", "revision": "c0ffee"}
    assert model_identity("org/name", cache_dir=str(tmp_path)) == named
    assert model_identity("org/name", environ={"HF_HUB_CACHE": str(tmp_path)}) == named
    commit = "0123456789" * 4
    assert model_identity("org/name", commit, cache_dir=str(tmp_path)) == named | {"revision": commit}
    assert model_identity("org/name:Q4_K_M", cache_dir=str(tmp_path))["revision"] == "c0ffee"
    snapshot = tmp_path / "models--org--name" / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    assert model_identity(str(snapshot)) == named, "an offline start must have the same identity"


def test_an_external_configuration_and_code_in_its_folders_are_digested(model, tmp_path):
    (model / "layers").mkdir()
    (model / "layers" / "norm.py").write_text("a")
    found = [model_identity(str(tmp_path), configured_by=str(model))]
    (model / "layers" / "norm.py").write_text("b")
    found.append(model_identity(str(tmp_path), configured_by=str(model)))
    assert found[0] != found[1]


def test_an_adapter_that_changes_in_place_is_another_model(model, tmp_path):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    found = []
    for content in (b"first", b"other"):
        (adapter / "adapter_model.safetensors").write_bytes(content)
        found.append(model_identity(str(model), adapters={"audio": str(adapter)}))
    assert found[0] != found[1]
    unknown = model_identity(str(model), adapters={"audio": "org/adapter"}, cache_dir=str(tmp_path))
    assert "'org/adapter'" in weights_problem(unknown)


def test_a_model_file_that_is_not_json_is_digested_unchanged(model):
    found = []
    for content in (b"\xff1", b"\xff2"):
        (model / "processor_config.json").write_bytes(content)
        found.append(identity(model))
    assert found[0] != found[1]


def test_hub_code_and_drafters_are_identified_by_their_commits(tmp_path):
    arguments = {"cache_dir": str(tmp_path), "code": ["org/code"], "draft": {"name": "org/draft"}}
    (tmp_path / "w.gguf").write_bytes(b"gguf")
    unknown = model_identity(str(tmp_path / "w.gguf"), **arguments)
    assert "'org/draft'" in weights_problem(unknown)
    for name in ("code", "draft"):
        references = tmp_path / f"models--org--{name}" / "refs"
        references.mkdir(parents=True)
        (references / "main").write_text("c0ffee")
    known = model_identity(str(tmp_path / "w.gguf"), **arguments)
    assert (weights_problem(known), known["draft"]["revision"]) == (None, "c0ffee")


# ---- weights without a known identity


def test_a_name_of_modelscope_is_not_looked_up_on_the_hub(tmp_path):
    references = tmp_path / "models--org--name" / "refs"
    references.mkdir(parents=True)
    (references / "main").write_text("c0ffee\n")
    environ = {"HF_HUB_CACHE": str(tmp_path), "VLLM_USE_MODELSCOPE": "True"}
    identity = model_identity("org/name", environ=environ)
    assert "ModelScope" in (weights_problem(identity) or "")
    assert weights_problem(model_identity("org/name", model_id="mine", environ=environ)) is None
    assert model_identity(str(tmp_path), environ=environ) == model_identity(str(tmp_path), environ={})


def test_weights_at_an_address_are_identified_by_it(tmp_path):
    """For an s3:// model, vLLM downloads only the config files, into a directory of its own."""
    (tmp_path / "config.json").write_text("{}")
    first, second = (
        model_identity(str(tmp_path), address=address)
        for address in ("s3://bucket/base/", "s3://bucket/tuned")
    )
    assert first != second
    assert first == model_identity(str(tmp_path), address="s3://bucket/base")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"name": "{tmp}", "address": "s3://bucket/base"}, "at s3://bucket/base"),
        ({"name": "{tmp}"}, "no weight files"),
        ({"name": "org/other"}, "'org/other' is not a directory"),
        ({"name": "org/other", "revision": "v2"}, "'org/other' at revision 'v2'"),
    ],
)
def test_weights_are_unknown_until_the_operator_names_them(tmp_path, arguments, said):
    arguments = {key: value.format(tmp=tmp_path) for key, value in arguments.items()}
    unnamed = model_identity(**arguments, cache_dir=str(tmp_path))
    assert said in weights_problem(unnamed)
    named = [model_identity(**arguments, model_id=name, cache_dir=str(tmp_path)) for name in ("a", "b")]
    assert [weights_problem(identity) for identity in named] == [None, None]
    assert named[0] != named[1]


def test_a_weights_name_never_replaces_a_found_identity(model):
    first = model_identity(str(model), model_id="llama")
    assert weights_problem(identity(model)) is None
    (model / "model-2.safetensors").write_bytes(b"other!")
    assert model_identity(str(model), model_id="llama") != first


# ---- the seed of the hashes


@pytest.mark.parametrize(
    ("algorithm", "environ", "random"),
    [
        ("sha256", {}, False),
        ("sha256_cbor", {}, False),
        ("xxhash", {}, True),
        ("xxhash_cbor", {}, True),
        ("xxhash", {"PYTHONHASHSEED": "0"}, False),
    ],
)
def test_a_random_seed_is_detected(algorithm, environ, random):
    assert hash_seed_is_random(algorithm, environ) is random


def test_the_warning_names_the_setting():
    warning = random_seed_warning("xxhash")
    assert "PYTHONHASHSEED" in warning
    assert "sha256" in warning


def test_differences_from_other_namespaces_of_a_root_are_named(tmp_path):
    own = FACTS
    other = dataclasses.replace(own, kv_dtype="fp8", settings={**own.settings, "attention": "other"})
    for which in (own, other):
        directory = tmp_path / which.namespace_id().hex()
        directory.mkdir()
        (directory / "namespace.json").write_text(which.readable_json())
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "namespace.json").write_text("{")
    assert other_namespaces(str(tmp_path), own) == ["kv_dtype, settings.attention"]
    assert other_namespaces(str(tmp_path / "missing"), own) == []


def test_parts_of_other_hosts_in_a_shared_root_are_no_other_namespaces(tmp_path):
    own, other = FACTS.with_part("rank 0 of 2"), FACTS.with_part("rank 1 of 2")
    for identity in (own, other):
        path = tmp_path / identity.namespace_id().hex() / "namespace.json"
        path.parent.mkdir()
        path.write_text(identity.readable_json())
    assert other_namespaces(str(tmp_path), own) == []
