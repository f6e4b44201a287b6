# SPDX-License-Identifier: Apache-2.0
"""Run by test_contract.py under each vLLM release: the settings that change the namespace."""

import copy
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import adapter
import pytest
import torch

adapter.use_specs()

from kv_offload.specs import KVOffloadSpec, compat, identity, packing, worker  # noqa: E402
from kv_offload.specs import spec as spec_module  # noqa: E402
from kv_offload.specs.identity_table import CONFIGURATION  # noqa: E402
from kv_offload.specs.resolved_settings import configured, environment  # noqa: E402
from oracle.engine import Setup, _vllm_config, make_model_dir  # noqa: E402
from vllm import envs  # noqa: E402
from vllm.config.multimodal import MultiModalConfig  # noqa: E402

from contract.parts import kv_caches, offloading_config  # noqa: E402
from kv_offload.calibration import Calibration, CalibrationError, HeadFactors, LayerFactors  # noqa: E402
from kv_offload.losses import ErrorBounds  # noqa: E402
from kv_offload.namespace import NamespaceIdentity, setting_text  # noqa: E402

Change = Callable[[Any], None]


@pytest.fixture
def resolved(vllm_config: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's own resolved configuration, whose only layer is the fixture's."""
    made = _vllm_config(Setup(), make_model_dir(), "engine")
    made.compilation_config.static_forward_context.update(
        vllm_config.compilation_config.static_forward_context
    )
    made.model_config.multimodal_config = MultiModalConfig()
    monkeypatch.setattr(compat, "current_vllm_config", lambda: made)
    return made


def settings(rank: int = 0) -> dict[str, str]:
    text = identity.worker_fingerprint(offloading_config(rank=rank), "cpu", "host", [[4096]], 100)
    merged = identity.merge_fingerprints([text])
    assert merged["unread"] == []
    return dict(merged["settings"])


def media(name: str, value: Any) -> Change:
    return lambda config: setattr(config.model_config.multimodal_config, name, value)


OTHER_BYTES: dict[str, Change] = {
    "processor arguments": media("mm_processor_kwargs", {"max_pixels": 1024}),
    "media arguments": media("media_io_kwargs", {"video": {"num_frames": 8}}),
    "video pruning": media("video_pruning_rate", 0.5),
    "encoder precision": media("mm_encoder_attn_dtype", "fp8"),
    "configuration of the model": lambda config: config.model_config.hf_config.update({"rms_norm_eps": 0.5}),
    "settings of a platform": lambda config: setattr(config, "additional_config", {"new": 1}),
}


@pytest.mark.parametrize("name", OTHER_BYTES)
def test_a_setting_that_changes_bytes_changes_the_namespace(resolved: Any, name: str) -> None:
    before = settings()
    OTHER_BYTES[name](resolved)
    assert settings() != before


READERS = ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor")
OTHER_FORMATS = (
    *("dummy", "pt", "npcache", "mistral", "sharded_state", "tensorizer", "ipc_cache"),
    "runai_streamer",  # it ignores the secondary weights of a model's class
)


def namespaces_by_format(resolved: Any, formats: tuple[str, ...]) -> int:
    found = set()
    for name in formats:
        resolved.load_config.load_format = name
        found.add(setting_text(settings()))
    return len(found)


@pytest.mark.parametrize(
    ("files", "one_set"),
    [
        (["model.safetensors"], True),
        (["a.safetensors", "b.safetensors", "model.safetensors.index.json"], True),
        (["a.safetensors", "b.safetensors", "c.safetensors", "model.safetensors.index.json"], False),
        (["model.safetensors", "consolidated.safetensors"], False),
        (["model.bin"], False),
    ],
    ids=lambda value: str(value) if isinstance(value, bool) else " ".join(value),
)
@pytest.mark.parametrize("of", ["model", "drafter"])
def test_the_load_format_is_in_the_namespace_unless_it_selects_only_a_speed(
    resolved: Any, tmp_path: Path, of: str, files: list[str], one_set: bool
) -> None:
    for name in files:
        (tmp_path / name).write_text('{"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}')
    one = tmp_path / "one"
    one.mkdir()
    (one / "model.safetensors").touch()
    resolved.model_config.model = str(tmp_path if of == "model" else one)
    if of == "drafter":
        _draft(resolved, str(tmp_path))
    assert namespaces_by_format(resolved, READERS) == (1 if one_set else len(READERS))
    assert namespaces_by_format(resolved, ("auto", *OTHER_FORMATS)) == 1 + len(OTHER_FORMATS)


def test_a_variable_that_changes_a_librarys_precision_changes_the_namespace(
    resolved: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = settings()
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    assert settings() != before


def test_a_field_that_no_table_names_is_in_the_namespace(
    resolved: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = settings()
    resolved.scheduler_config.max_num_seqs += 1
    assert settings() == before
    monkeypatch.delitem(CONFIGURATION, "scheduler_config.max_num_seqs")
    assert settings() != before


def test_a_file_that_a_setting_names_is_identified_by_its_content(resolved: Any, tmp_path: Path) -> None:
    found = []
    for folder, content in (("a", "1"), ("a", "2"), ("b", "2")):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "scales.json").write_text(content)
        media("mm_encoder_fp8_scale_path", str(tmp_path / folder / "scales.json"))(resolved)
        found.append(settings())
    assert found[0] != found[1] == found[2]


def test_a_file_in_the_working_directory_is_identified_by_content_but_a_word_is_not_a_file(
    resolved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found: dict[str, list[Any]] = {}
    for name in ("scales.json", "auto"):
        media("mm_encoder_fp8_scale_path", name)(resolved)
        for content in ("1", "2"):
            (tmp_path / name).write_text(content)
            found.setdefault(name, []).append(settings())
    assert found["scales.json"][0] != found["scales.json"][1]
    assert found["auto"][0] == found["auto"][1]


def test_nested_values_of_a_setting_are_in_the_namespace(resolved: Any) -> None:
    found = []
    for value in (1, 2):
        nested: Any = value
        for _ in range(20):
            nested = {"inside": [nested]}
        resolved.model_config.hf_overrides = nested
        found.append(settings())
    assert found[0] != found[1]


def test_a_drafter_from_another_revision_of_the_model_is_identified(resolved: Any) -> None:
    model = resolved.model_config
    model.revision = "0" * 40
    drafts = []
    for revision in (model.revision, None):
        draft = SimpleNamespace(model=model.model, revision=revision)
        resolved.speculative_config = SimpleNamespace(draft_model_config=draft)
        text = identity.worker_fingerprint(offloading_config(), "cpu", "host", [[4096]], 100)
        drafts.append(json.loads(text)["model"]["draft"])
    assert drafts == [None, {"name": model.model, "revision": None}]


def _draft(config: Any, directory: str) -> None:
    config.speculative_config = SimpleNamespace(
        draft_model_config=SimpleNamespace(model=directory, revision=None)
    )


BESIDE_THE_WEIGHTS: dict[str, Callable[[Any, str], None]] = {
    "configuration": lambda config, directory: setattr(config.model_config, "hf_config_path", directory),
    "drafter": _draft,
    "adapter": lambda config, directory: setattr(
        config, "lora_config", SimpleNamespace(default_mm_loras={"image": directory})
    ),
}


@pytest.mark.parametrize("name", BESIDE_THE_WEIGHTS)
def test_files_next_to_the_weights_are_in_the_namespace(resolved: Any, tmp_path: Path, name: str) -> None:
    BESIDE_THE_WEIGHTS[name](resolved, str(tmp_path))
    config = offloading_config()
    found = set()
    for content in ("{}", '{"a": 1}'):
        (tmp_path / "config.json").write_text(content)
        text = identity.worker_fingerprint(config, "cpu", "host", [[4096]], 100)
        merged = identity.merge_fingerprints([text])
        made, _ = identity.namespace_identity(config, [[4096]], merged, False)
        found.add(made.short_id())
    assert len(found) == 2


ANOTHER_PROCESS = """
import json, sys
import adapter
adapter.use_specs()
from kv_offload.specs.resolved_settings import configured, environment
from oracle.engine import Setup, _vllm_config
made = _vllm_config(Setup(extra={"root": sys.argv[2]}, num_blocks=80), sys.argv[1], sys.argv[2])
print(json.dumps(configured(made) | environment()))
"""


def test_another_process_on_another_host_has_the_same_settings(tmp_path: Path) -> None:
    directory = make_model_dir()
    here = configured(_vllm_config(Setup(), directory, "engine"))
    there = shutil.copytree(directory, tmp_path / "model")
    home = str(tmp_path / "home")
    # With the cached properties of model classes, the process starts no further process that imports vLLM.
    shutil.copytree(Path(envs.VLLM_CACHE_ROOT) / "modelinfos", Path(home) / "modelinfos")
    result = subprocess.run(
        [sys.executable, "-c", ANOTHER_PROCESS, str(there), "another"],
        env=os.environ
        | {"PYTHONHASHSEED": "1", "HOME": home, "HF_HOME": home, "VLLM_CACHE_ROOT": home, "VLLM_PORT": "1"}
        | {"PYTHONPATH": os.pathsep.join(sys.path), "VLLM_CPU_KVCACHE_SPACE": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert json.loads(result.stdout.splitlines()[-1]) == here | environment()


@pytest.mark.parametrize(("rotation", "in_it"), [("default", False), ("dynamic", True)])
def test_max_model_len_of_a_drafter_is_in_the_namespace_where_it_selects_the_rotation(
    rotation: str, in_it: bool
) -> None:
    directory = make_model_dir()
    found = set()
    for longest in (320, 400):
        made = _vllm_config(Setup(drafts=2, max_model_len=longest), directory, "engine")
        draft = copy.copy(made.speculative_config.draft_model_config)
        draft.hf_text_config = copy.copy(draft.hf_text_config)
        draft.hf_text_config.rope_parameters = {"rope_type": rotation}
        made.speculative_config.draft_model_config = draft
        assert draft.max_model_len == longest
        found.add(setting_text(configured(made)))
    assert len(found) == (2 if in_it else 1)


def test_two_starts_ranks_and_replicas_have_one_namespace(
    resolved: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = settings()
    again = copy.copy(resolved)
    again.parallel_config = copy.copy(resolved.parallel_config)
    again.instance_id = "another"
    for name, value in {
        "rank": 1,
        "data_parallel_rank": 1,
        "data_parallel_index": 1,
        "data_parallel_size": 2,
        "data_parallel_master_port": 1234,
        "master_port": 4321,
        "assigned_physical_gpu_ids": [1],
    }.items():
        setattr(again.parallel_config, name, value)
    again.kv_transfer_config = copy.copy(resolved.kv_transfer_config)
    again.kv_transfer_config.engine_id = "another"
    monkeypatch.setattr(compat, "current_vllm_config", lambda: again)
    for variable in ("VLLM_PORT", "LOCAL_RANK", "VLLM_DP_RANK", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(variable, "1")
    assert settings(rank=1) == first


def test_the_axes_of_convolution_states_are_in_the_namespace(
    resolved: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for layout in ("SD", "DS"):
        monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", layout)
        found.append(settings())
    assert found[0] != found[1]


def test_the_instruction_set_that_pages_are_packed_for_is_in_the_namespace(
    resolved: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.attention.backends import cpu_attn

    found = []
    for name in ("amx", "vec"):
        monkeypatch.setattr(cpu_attn, "_get_attn_isa", lambda *_, name=name: name)
        found.append(settings())
    assert found[0] != found[1]


@pytest.mark.parametrize(
    ("backend", "element", "in_it"),
    [
        ("FLASH_ATTN", "bfloat16", False),
        ("FLASH_ATTN", "float8_e4m3fn", True),
        ("FLASHINFER_MLA", "bfloat16", True),
    ],
)
def test_the_compute_capability_is_in_the_namespace_where_it_may_matter(
    resolved: Any, monkeypatch: pytest.MonkeyPatch, backend: str, element: str, in_it: bool
) -> None:
    from vllm.platforms import current_platform

    monkeypatch.setattr(compat, "layer_element", lambda *_: element)

    layer = resolved.compilation_config.static_forward_context["layer.0"]
    layer.attn_backend = SimpleNamespace(get_name=lambda: backend)
    found = set()
    for major in (9, 10):
        capability = SimpleNamespace(major=major, minor=0)
        monkeypatch.setattr(type(current_platform), "get_device_capability", lambda *_, c=capability: c)
        found.add(packing.layer_packing(layer, resolved, "cuda"))
    assert len(found) == (2 if in_it else 1)


def test_cuda_and_rocm_devices_of_equal_capability_have_different_namespaces(
    resolved: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.platforms import current_platform

    layer = resolved.compilation_config.static_forward_context["layer.0"]
    layer.attn_backend = SimpleNamespace(get_name=lambda: "TRITON_MLA")
    capability = SimpleNamespace(major=9, minor=0)
    monkeypatch.setattr(type(current_platform), "get_device_capability", lambda *_: capability)
    found = set()
    for name in ("cuda", "rocm"):
        monkeypatch.setattr(type(current_platform), "device_name", name)
        found.add(packing.layer_packing(layer, resolved, "cuda"))
    assert len(found) == 2


@pytest.mark.parametrize("extra", ["secondary_tiers", "keep_host_memory"])
@pytest.mark.parametrize("why", ["backends", "configuration", "numbered images"])
def test_a_cache_that_outlives_its_server_is_refused(
    resolved: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, extra: str, why: str
) -> None:
    if why == "backends":
        resolved.compilation_config.static_forward_context.clear()
    elif why == "configuration":
        monkeypatch.setattr(compat, "current_vllm_config", lambda: None)
    else:
        resolved.cache_config.enable_prefix_caching = False
        resolved.model_config.multimodal_config.mm_processor_cache_gb = 0
    tiers = [{"type": "fs", "root_dir": str(tmp_path / "root"), "max_bytes": "16MiB"}]
    config = offloading_config(model_id="m", **{extra: tiers if extra == "secondary_tiers" else True})
    made = KVOffloadSpec(config).get_worker(kv_caches())
    said = "numbers images" if why == "numbered images" else "failed to read"
    with pytest.raises(ValueError, match=f"^{extra}: .*{said}"):
        KVOffloadSpec(config).get_manager()
    made.shutdown()


def test_a_scheduler_in_each_rank_is_refused(resolved: Any) -> None:
    worker.refuse_external_launcher()
    resolved.parallel_config.distributed_executor_backend = "external_launcher"
    worker.refuse_external_launcher()  # one rank has one scheduler
    resolved.parallel_config.world_size = 2
    with pytest.raises(ValueError, match="a scheduler in each of the 2 ranks"):
        worker.refuse_external_launcher()


def test_the_flag_for_mistaken_session_blocks_matches_vllms_behaviour() -> None:
    from vllm.distributed.kv_transfer.kv_connector.utils import yield_req_data

    new = SimpleNamespace(req_id="", block_ids=())
    cached = SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set())
    output = SimpleNamespace(scheduled_new_reqs=[new], scheduled_cached_reqs=cached)
    assert compat.misplaces_session_blocks() is not next(iter(yield_req_data(output)))[2]


def test_only_keys_and_values_per_head_in_16_bits_or_fp8_may_lose_precision(
    vllm_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
    from vllm.v1.kv_cache_interface import (
        CrossAttentionSpec,
        FullAttentionSpec,
        MLAAttentionSpec,
        get_kv_quant_mode,
    )

    def layer_of(spec: Any, name: str = "auto", backend: str = "FLASHINFER") -> Any:
        return SimpleNamespace(
            get_kv_cache_spec=lambda _: spec,
            kv_cache_dtype=name,
            attn_backend=SimpleNamespace(get_name=lambda: backend, customize_spec=lambda spec: spec),
        )

    def may_lose(spec: Any, name: str = "auto") -> bool:
        return compat.layer_may_lose(layer_of(spec, name), vllm_config)

    shape = {"block_size": 16, "num_kv_heads": 1, "head_size": 64}
    assert may_lose(FullAttentionSpec(**shape, dtype=torch.bfloat16))
    assert may_lose(FullAttentionSpec(**shape, dtype=torch.float16))
    assert not may_lose(FullAttentionSpec(**shape, dtype=torch.float32))
    assert not may_lose(MLAAttentionSpec(**shape, dtype=torch.bfloat16)), "a latent cache"
    assert not may_lose(CrossAttentionSpec(**shape, dtype=torch.bfloat16)), "a kind that was not measured"

    def quantized(name: str, kind: Any = FullAttentionSpec) -> Any:
        return kind(**shape, dtype=STR_DTYPE_TO_TORCH_DTYPE[name], kv_quant_mode=get_kv_quant_mode(name))

    def element(name: str, backend: str = "FLASHINFER") -> str:
        return compat.layer_element(layer_of(quantized(name), name, backend), vllm_config)

    elements = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
    for name, found in elements.items():
        assert element(name) == found
        assert may_lose(quantized(name), name)
        assert not may_lose(quantized(name, MLAAttentionSpec), name), "a latent cache"
    for name in ("fp8_per_token_head", "int8_per_token_head", "nvfp4", "fp8_ds_mla", "fp8_inc"):
        assert element(name) == "bytes", "scales among the elements, or another format"
        assert not may_lose(quantized(name), name)
    for name in ("nvfp4", "fp8_inc"):
        layer = layer_of(quantized(name), "fp8")
        assert compat.layer_element(layer, vllm_config) == "bytes", "the cache is not what the name says"
    assert element("fp8_e5m2", "CPU_ATTN") == "float8_e5m2"
    for backend in ("TRITON_ATTN", "ROCM_AITER_UNIFIED_ATTN"):
        assert element("fp8_e5m2", backend) == "bytes", "the backend stores e4m3 under this name"
    unknown = SimpleNamespace(get_kv_cache_spec=lambda _: quantized("fp8_e5m2"), kv_cache_dtype="fp8_e5m2")
    assert compat.layer_element(unknown, vllm_config) == "bytes", "the backend is not known"
    monkeypatch.setattr(type(current_platform), "is_fp8_fnuz", classmethod(lambda _: True))
    assert element("fp8") == "bytes", "the numbers of some AMD GPUs"
    assert element("fp8_e5m2") == "float8_e5m2"


def test_the_backends_that_count_as_e5m2_store_e5m2() -> None:
    """CPU_ATTN is tried. The source of the others is compared, because their kernels need a GPU."""
    from vllm import _custom_ops
    from vllm.v1.attention.backends import cpu_attn

    assert set(compat._E5M2_BACKENDS) == {"CPU_ATTN", "FLASHINFER"}
    folder = Path(cpu_attn.__file__).parent
    view = 'elifself.kv_cache_dtypein("fp8_e5m2",torch.float8_e5m2):fp8_view_dtype=torch.float8_e5m2'
    assert view in "".join((folder / "flashinfer.py").read_text().split())
    # This one stores what is the platform's type, whatever the name.
    triton = "".join((folder / "triton_attn.py").read_text().split())
    assert "self.fp8_dtype=current_platform.fp8_dtype()" in triton
    assert "key_cache=key_cache.view(self.fp8_dtype)" in triton
    if not hasattr(torch.ops._C, "cpu_attn_reshape_and_cache") or not torch.cpu._is_avx512_supported():
        pytest.skip("needs the kernels of vLLM for CPUs with AVX-512")
    kinds = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
    powers = torch.tensor([2.0**power for power in range(-6, 8)]).repeat(32 * 64)[: 32 * 64]
    keys = powers.reshape(32, 1, 64).to(torch.bfloat16)
    for name, kind in kinds.items():
        cache = torch.zeros(2, 1, 2 * 32, 64, dtype=torch.uint8)
        slots = torch.arange(32) + 32  # of the second block
        _custom_ops.cpu_attn_reshape_and_cache(
            keys, -keys, *cache.chunk(2, dim=2), slots, "vec", kv_cache_dtype=name
        )
        stored = cache[1].reshape(2, -1).view(kind).float().sort(dim=1).values
        assert torch.equal(stored[0], powers.sort().values), name
        assert torch.equal(stored[1], (-powers).sort().values), name


def test_fp8_elements_that_lose_precision_change_the_namespace_of_lossy_servers() -> None:
    merged = {"elements": ["float8_e4m3fn", "float8_e5m2", "bfloat16"], "may_lose": [True, False, True]}
    found = spec_module._fp8_elements(merged)
    assert found == {0: "float8_e4m3fn"}
    facts = NamespaceIdentity({}, "fp8", "LBNHC", (), 1, 16, "sha256", "00")
    bounds = ErrorBounds(0.05, 0.05)
    names = {
        facts.with_error_bounds(bounds, (), each).namespace_id() for each in ({}, found, {0: "float8_e5m2"})
    }
    assert len(names) == 3
    assert facts.with_error_bounds(bounds, (), {}) == facts.with_error_bounds(bounds)
    assert facts.with_error_bounds(None, (), found) is facts


def test_a_lossy_tier_gives_all_tiers_a_namespace_of_their_own(resolved: Any, tmp_path: Path) -> None:
    found = []
    for compress in ("zstd", "lossy:0.05", "lossy:0.1"):
        places = [tmp_path / compress / name for name in ("near", "far")]
        tiers = [
            {"type": "fs", "root_dir": str(place), "max_bytes": "16MiB", "compress": each}
            for place, each in zip(places, ("zstd", compress), strict=True)
        ]
        spec = KVOffloadSpec(offloading_config(model_id="m", secondary_tiers=tiers))
        made = spec.get_worker(kv_caches())
        manager = spec.get_manager()
        spaces = [path for place in places for path in place.glob("*/namespace.json")]
        names = {path.parent.name for path in spaces}
        assert len(spaces) == 2
        assert len(names) == 1, "both tiers have the same"
        found.append((names.pop(), json.loads(spaces[0].read_text())["settings"].get("max_error")))
        manager.shutdown()
        made.shutdown()
    assert [error for _, error in found] == [None, "0.05", "0.1"]
    assert len({name for name, _ in found}) == 3


@pytest.mark.parametrize("is_known", [False, True])
def test_a_group_whose_values_are_unknown_is_named_with_the_reason(
    resolved: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, is_known: bool
) -> None:
    caches = kv_caches()
    if is_known:
        layer = resolved.compilation_config.static_forward_context["layer.0"]
        layer.kv_cache = caches.tensors[0].tensor.view(torch.bfloat16).view(8, 2, 16, 64)
    tier = {"type": "fs", "root_dir": str(tmp_path), "max_bytes": "16MiB", "compress": "lossy:0.05:0.1"}
    spec = KVOffloadSpec(offloading_config(model_id="m", secondary_tiers=[tier]))
    made = spec.get_worker(caches)
    spec.get_manager().shutdown()
    made.shutdown()
    named = (
        "cache groups [0]: layout of keys and values unknown (a layer has no single cache tensor); "
        "the keys' bound, 0.05, applies to all elements"
    )
    assert (named in caplog.text) == (not is_known)
    assert "contain a key" not in caplog.text
    (space,) = tmp_path.glob("*/namespace.json")
    settings = json.loads(space.read_text())["settings"]
    assert settings["max_value_error"] == "0.1"
    assert settings["kv_runs"] == ("[[1024,1024]]" if is_known else "[[0,0]]")


def test_a_group_in_which_every_64_elements_contain_a_key_is_named(
    resolved: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caches = kv_caches()
    layer = resolved.compilation_config.static_forward_context["layer.0"]
    layer.attn_backend = SimpleNamespace(get_name=lambda: "FLASH_ATTN", customize_spec=lambda spec: spec)
    layer.kv_cache = caches.tensors[0].tensor.view(torch.bfloat16).view(8, 2, 16, 64)
    tier = {"type": "fs", "root_dir": str(tmp_path), "max_bytes": "16MiB", "compress": "lossy:0.05:0.1"}
    spec = KVOffloadSpec(offloading_config(model_id="m", secondary_tiers=[tier]))
    made = spec.get_worker(caches)
    spec.get_manager().shutdown()
    made.shutdown()
    assert "cache groups [0]: every 64 neighbouring elements contain a key" in caplog.text


def test_a_calibration_is_in_the_namespace_and_must_be_of_this_model(
    resolved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published: list[str] = []

    def watch(name: str) -> None:
        of_worker = getattr(worker, name)

        def called(*given: Any) -> Any:
            published.append(name)
            return of_worker(*given)

        monkeypatch.setattr(worker, name, called)

    watch("head_orders_of")
    watch("layer_ranges_of")

    def started(name: str, calibration: Path | None) -> dict[str, Any]:
        """Returns what namespace.json says of a server with a new root."""
        caches = kv_caches()
        layer = resolved.compilation_config.static_forward_context["layer.0"]
        layer.kv_cache = caches.tensors[0].tensor.view(torch.bfloat16).view(8, 2, 16, 64)
        tier = {"type": "fs", "root_dir": str(tmp_path / name), "max_bytes": "16MiB", "compress": "lossy:0.2"}
        if calibration is not None:
            tier["calibration"] = str(calibration)
        spec = KVOffloadSpec(offloading_config(model_id="m", secondary_tiers=[tier]))
        made = spec.get_worker(caches)
        try:
            spec.get_manager().shutdown()
        finally:
            made.shutdown()
        (space,) = (tmp_path / name).glob("*/namespace.json")
        described: dict[str, Any] = json.loads(space.read_text())
        return described

    plain = started("plain", None)
    assert "calibration" not in plain["settings"]
    assert not published, "the control page has room for them only if they are used"
    heads = (HeadFactors((0.5,), (0.5,), (0,) * 32),) * 2
    model = {name: value for name, value in plain["model"].items() if name != "model_id"}
    calibration = Calibration(model, (LayerFactors(heads, heads),), {})
    path = tmp_path / "calibration.json"
    calibration.write(path)
    calibrated = started("calibrated", path)
    assert published == ["head_orders_of", "layer_ranges_of"]
    assert calibrated["settings"].pop("calibration") == calibration.digest
    assert calibrated["settings"] == plain["settings"]
    # Each is refused before any record could be written.
    for of_model, layers, reason in (
        ({**model, "name": "other"}, calibration.layers, "of another model: name differ"),
        (model, (LayerFactors(heads * 2, heads * 2),), "has 4 KV heads, the cache 2"),
    ):
        Calibration(of_model, layers, {}).write(path)
        with pytest.raises(CalibrationError, match=reason):
            started("refused", path)
    path.write_text("{}")
    with pytest.raises(CalibrationError, match="is not a calibration"):
        started("refused", path)
    assert not list((tmp_path / "refused").glob("*/namespace.json"))
