# SPDX-License-Identifier: Apache-2.0
"""Two engines that differ in one property share one root: the second loads the first one's records exactly
when its bytes are the same.

Run by test_oracle.py, which also checks every loaded byte.
"""

import json
import random
import shutil
import socket
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import adapter
import pytest

adapter.use_specs()

import kv_offload  # noqa: E402
from kv_offload import _core  # noqa: E402
from oracle.check_oracle import FULL, ask_again, with_disk  # noqa: E402
from oracle.drive import total  # noqa: E402
from oracle.engine import Engine, Setup, make_model_dir  # noqa: E402

Change = Callable[[Setup], Setup]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


OTHER_BYTES: dict[str, Change] = {
    "dtype": lambda setup: replace(setup, kv_dtype="float16"),
    "block size": lambda setup: replace(setup, block_size=32),
    "chunk": lambda setup: replace(setup, extra={**setup.extra, "blocks_per_chunk": 2}),
    "layout": lambda setup: replace(setup, layout="BLHNC"),
    "ranks": lambda setup: replace(setup, world_size=2),
    "layers": lambda setup: replace(setup, layers=2),
    "groups": lambda setup: replace(setup, window=40),
    "hash algorithm": lambda setup: replace(setup, hash_algorithm="sha256_cbor"),
}
SAME_BYTES: dict[str, Change] = {
    "nothing": lambda setup: setup,
    "host memory": lambda setup: replace(setup, extra={**setup.extra, "cpu_bytes_to_use": "1MiB"}),
    "longest request": lambda setup: replace(setup, max_model_len=400),
    "device cache": lambda setup: replace(setup, num_blocks=60),
    "batch": lambda setup: replace(setup, max_seqs=3, max_batched_tokens=64),
    "asynchronous scheduling": lambda setup: replace(setup, async_scheduling=True),
    "events": lambda setup: replace(setup, events=True),
    "metrics port": lambda setup: replace(setup, extra={**setup.extra, "metrics_port": free_port()}),
    "policy": lambda setup: replace(setup, extra={**setup.extra, "eviction_policy": "lru"}),
}


def prompts() -> list[list[int]]:
    rng = random.Random(11)
    return [[rng.randrange(1000) for _ in range(rng.randrange(70, 200))] for _ in range(4)]


def serve(setup: Setup, model_dir: str, **request: str) -> float:
    """Runs one engine life: sends each prompt until it is recorded. Returns the tokens loaded from disk."""
    engine = Engine(setup, f"identity-{uuid.uuid4()}", model_dir)
    try:
        ask_again(engine, prompts(), **request)
        return total(engine, "kv_offload_hit_tokens_total", "fs")
    finally:
        engine.shutdown()


class Recorded:
    """A root in which one engine has recorded the prompts."""

    def __init__(self, directory: Path, setup: Setup = FULL, model_dir: str | None = None) -> None:
        self.root = directory / "root"
        self.model_dir = model_dir or make_model_dir()
        self.setup = with_disk(setup, self.root, max_bytes="64MiB")
        assert serve(self.setup, self.model_dir) == 0

    def namespaces(self) -> int:
        return len(_core.FsRoot(str(self.root)).stat()["namespaces"])


@pytest.fixture
def recorded(tmp_path: Path) -> Recorded:
    return Recorded(tmp_path)


def expected_tokens() -> int:
    return sum((len(prompt) - 1) // 16 * 16 for prompt in prompts())


@pytest.mark.parametrize("name", OTHER_BYTES)
def test_other_bytes_are_never_loaded(recorded: Recorded, name: str) -> None:
    assert serve(OTHER_BYTES[name](recorded.setup), recorded.model_dir) == 0
    assert recorded.namespaces() == 2
    assert serve(recorded.setup, recorded.model_dir) == expected_tokens(), (
        "records of the other engine replaced ours"
    )


@pytest.mark.parametrize("name", SAME_BYTES)
def test_the_same_bytes_are_loaded(recorded: Recorded, name: str) -> None:
    assert serve(SAME_BYTES[name](recorded.setup), recorded.model_dir) == expected_tokens()
    assert recorded.namespaces() == 1


def test_other_weights_have_another_namespace_but_a_copy_does_not(recorded: Recorded, tmp_path: Path) -> None:
    copied = shutil.copytree(recorded.model_dir, tmp_path / "copied")
    assert serve(recorded.setup, str(copied)) == expected_tokens()
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"rope_theta": 12345.0}))
    assert serve(recorded.setup, str(copied)) == 0
    (copied / "model.safetensors").write_bytes(b"other weights" * 1000)
    assert serve(recorded.setup, str(copied)) == 0
    assert recorded.namespaces() == 3


def test_another_revision_of_a_hub_model_has_another_namespace_in_any_directory(tmp_path: Path) -> None:
    def snapshot(cache: str, commit: str) -> str:
        folder = tmp_path / cache / "models--org--name" / "snapshots" / commit
        return str(shutil.copytree(model_dir, folder))

    model_dir = make_model_dir()
    recorded = Recorded(tmp_path, model_dir=snapshot("cache", "c0ffee"))
    assert serve(recorded.setup, snapshot("cache", "decade")) == 0
    assert recorded.namespaces() == 2
    assert serve(recorded.setup, snapshot("another cache", "c0ffee")) == expected_tokens()
    assert recorded.namespaces() == 2


def test_another_build_of_this_package_loads_the_records(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_core, "__version__", "99.0")
    monkeypatch.setattr(kv_offload, "__version__", "99.0", raising=False)
    assert serve(recorded.setup, recorded.model_dir) == expected_tokens()
    assert recorded.namespaces() == 1


@pytest.mark.parametrize("algorithm", ["sha256", "xxhash"])
def test_another_hash_seed_has_another_namespace(
    algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    recorded = Recorded(tmp_path, replace(FULL, hash_algorithm=algorithm))
    assert serve(recorded.setup, recorded.model_dir) == expected_tokens()
    monkeypatch.setenv("PYTHONHASHSEED", "2")
    loaded = serve(recorded.setup, recorded.model_dir)
    # sha256 may have one seed whatever the environment says; where it does not, the namespace differs.
    same = (expected_tokens(), 1)
    assert (loaded, recorded.namespaces()) in ([(0, 2), same] if algorithm == "sha256" else [(0, 2)])


@pytest.mark.parametrize("request_of", [{"salt": "tenant"}, {"lora": "adapter"}], ids=["salt", "lora"])
def test_prompts_of_another_tenant_or_adapter_are_not_loaded(
    recorded: Recorded, request_of: dict[str, str]
) -> None:
    assert serve(recorded.setup, recorded.model_dir, **request_of) == 0
    assert serve(recorded.setup, recorded.model_dir, **request_of) == expected_tokens()
    (name,) = request_of
    assert serve(recorded.setup, recorded.model_dir, **{name: "another"}) == 0
    assert recorded.namespaces() == 1, "tenants and adapters must differ in their keys only"


def test_the_comparison_detects_an_incomplete_namespace(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: with one namespace for all, records of another model are loaded."""
    from kv_offload.namespace import NamespaceIdentity

    monkeypatch.setattr(NamespaceIdentity, "namespace_id", lambda self: bytes(32))
    monkeypatch.setattr(NamespaceIdentity, "readable_json", lambda self: "{}")
    for expected in (0, expected_tokens()):
        assert serve(recorded.setup, make_model_dir(vocab_size=1000 + expected)) == expected
