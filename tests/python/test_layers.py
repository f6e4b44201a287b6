"""Checks the includes and imports against the layer diagram; no dependency may point upwards.

    base <- memory, policy, index, storage, copy, metrics <- cache <- bindings <- kv_offload <- specs

In storage, files that all kinds of tiers share are next to the folders of the kinds: storage <- storage/fs,
... Shared files, other kinds and the cache must not depend on a kind; only bindings creates one.
"""

import ast
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

LAYERS = {
    "base": set(),
    "policy": {"base"},
    "memory": {"base"},
    "index": {"base", "policy"},
    "storage": {"base", "policy"},
    "copy": {"base"},
    "metrics": {"base"},
    "cache": {"base", "policy", "memory", "index", "storage", "copy", "metrics"},
    "bindings": {"base", "policy", "memory", "index", "storage", "copy", "metrics", "cache"},
}

# The parts of the cache, in the order of csrc/cache/tiered_cache.h: each may include earlier ones.
CACHE_PARTS = (
    "cache_types",
    *("chunk_groups", "tickets", "cache_events", "key_memory", "quarantine"),
    *("prefill_model", "transfer_model", "cost_model"),
    *("host_chunks", "tier_ops", "write_back", "row_supply", "load_jobs"),
    *("request_state", "requests", "lookup", "pass_scans", "planner", "stores"),
    "tiered_cache",
    *("trace_replay", "rank_worker"),  # independent of the order
)

# The parts of the fs tier's store, in the order of csrc/storage/fs/store.h. Files not named here are shared
# helpers (functions on files, Space): they include no part.
FS_PARTS = (
    *("open_root", "root_files", "open", "known_records", "draft", "shares"),
    *("evictor", "record_reader", "record_writer", "scanner", "foreign_records", "root_counter"),
    *("own_generation", "root_mender", "recency"),
    *("store", "tier", "probe_disk"),  # on top of the parts
)

# A pattern for the #include of a library, and the files (under csrc/) that may contain it.
LIBRARIES = {
    "CUDA": (
        r"(cuda|cub|thrust|cooperative_groups|nvml|device_launch)\b|cuda[_a-zA-Z]*\.h",
        r"copy/(cuda_.*|.*\.cuh?)",
    ),
    "torch": (r"(torch|ATen|c10|caffe2)/", r"bindings/torch_.*"),
    "Python": (r"(pybind11/|Python\.h)", r"bindings/(?!torch_).*"),
    "prometheus-cpp": (r"prometheus/", r"metrics/.*"),
    "xxhash": (r"xxh", r"base/xxh3\.h"),
    "zstd": (r"zstd", r"storage/payload_codec\.cc"),
    "libvalkey": (r"valkey/", r"storage/redis/(connection|tls)\.cc"),
    "OpenSSL": (r"openssl/", r"storage/(redis/tls|s3/signature|sealing|sealed_names)\.cc"),
    "libcurl": (r"curl/", r"nowhere: it is loaded where it is used, and a build has none of its headers"),
}

# Replays of a trace have the eviction order of an fs tier, by its own catalogue.
KIND_INCLUDES = {("cache/trace_replay.cc", "storage/fs/catalogue.h")}

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)
SOURCES = {".h", ".cc", ".cu", ".cuh"}


def kind_of(name: str) -> str:
    """Returns the kind of tier that a file belongs to: fs for storage/fs/space.h; "" for shared files."""
    parts = name.split("/")
    return parts[1] if parts[0] == "storage" and len(parts) == 3 else ""


def include_errors(root: Path) -> list[str]:
    csrc = root / "csrc"
    errors = []
    pinning = []
    for path in sorted(p for p in csrc.rglob("*") if p.suffix in SOURCES):
        name = path.relative_to(csrc).as_posix()
        layer = name.split("/")[0]
        if layer not in LAYERS:
            errors.append(f"{name}: {layer} is not a layer")
            continue
        for quote, header in INCLUDE.findall(path.read_text()):
            target = header.partition("/")[0] if "/" in header else ""  # <memory> is not memory/
            if quote == '"' and target not in LAYERS:
                errors.append(f"{name}: write {header} as <layer>/<file>")
            elif target in LAYERS and target != layer and target not in LAYERS[layer]:
                errors.append(f"{name}: {layer} must not include {header}")
            elif layer != "bindings" and kind_of(header) not in ("", kind_of(name)):
                if (name, header) in KIND_INCLUDES:
                    continue
                errors.append(f"{name}: only bindings and storage/{kind_of(header)} may include {header}")
            for library, (pattern, allowed) in LIBRARIES.items():
                if not re.match(pattern, header) or re.fullmatch(allowed, name):
                    continue
                if library == "CUDA" and layer == "memory":
                    pinning.append(name)
                else:
                    errors.append(f"{name}: {library} header {header}")
    if len(set(pinning)) > 1:
        errors.append(f"CUDA headers in several files of memory: {', '.join(sorted(set(pinning)))}")
    return errors


def cache_errors(root: Path) -> list[str]:
    """Lists the files of csrc/cache that include a part after their own."""
    errors = []
    for path in sorted(p for p in (root / "csrc/cache").iterdir() if p.suffix in SOURCES):
        if path.stem not in CACHE_PARTS:
            errors.append(f"{path.name}: is not listed in CACHE_PARTS")
            continue
        place = CACHE_PARTS.index(path.stem)
        for _, header in INCLUDE.findall(path.read_text()):
            layer, _, name = header.partition("/")
            if layer != "cache":
                continue
            known = name.removesuffix(".h")
            if known not in CACHE_PARTS or CACHE_PARTS.index(known) > place:
                errors.append(f"{path.name}: must not include {header}")
    return errors


def fs_errors(root: Path) -> list[str]:
    """Lists the files of csrc/storage/fs that include a part after their own."""
    errors = []
    for path in sorted(p for p in (root / "csrc/storage/fs").iterdir() if p.suffix in SOURCES):
        place = FS_PARTS.index(path.stem) if path.stem in FS_PARTS else -1
        for _, header in INCLUDE.findall(path.read_text()):
            name = header.removeprefix("storage/fs/").removesuffix(".h")
            if name == "tier":  # its options, which every part may include
                continue
            if header.startswith("storage/fs/") and name in FS_PARTS and FS_PARTS.index(name) > place:
                errors.append(f"{path.name}: must not include {header}")
    return errors


def imported_modules(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def import_errors(root: Path) -> list[str]:
    """Checks every import: at module level, inside functions, and for type checking only."""
    errors = []
    for path in sorted((root / "kv_offload").rglob("*.py")):
        for module in sorted(imported_modules(path)):
            forbidden = module.split(".")[0] in ("vllm", "torch", "specs") or module.startswith(
                "kv_offload.specs"
            )
            # code that uses tiers calls a kind; a kind must not import that code
            if path.parent.name == "tiers":
                forbidden |= module.startswith(("kv_offload.cli", "kv_offload.config", "kv_offload.machine"))
            if forbidden and (path.name, module) != ("torch_ops.py", "torch"):
                errors.append(f"{path.relative_to(root).as_posix()}: imports {module}")
    return errors


def specs_circle(root: Path) -> list[str]:
    """Returns modules of specs/ that import each other in a circle, in order; empty when there is none.

    Imports inside functions count, and so do imports for type checking only.
    """
    modules = {path.stem: path for path in (root / "specs").glob("*.py") if path.stem != "__init__"}

    def imported(name: str) -> set[str]:
        found = set()
        for node in ast.walk(ast.parse(modules[name].read_text())):
            if isinstance(node, ast.ImportFrom) and node.level == 1:
                found |= {node.module} if node.module else {alias.name for alias in node.names}
        return {each for each in found if each in modules}

    def follow(path: list[str]) -> list[str]:
        for name in sorted(imported(path[-1])):
            if name in path:
                return [*path[path.index(name) :], name]
            if name not in cleared and (circle := follow([*path, name])):
                return circle
        cleared.add(path[-1])
        return []

    cleared: set[str] = set()
    return next((circle for name in sorted(modules) if (circle := follow([name]))), [])


def test_the_modules_of_specs_have_no_import_cycle():
    assert specs_circle(REPOSITORY) == []


@pytest.mark.parametrize("line", ["from .a import f\n", "def g():\n    from . import a\n"])
def test_an_import_cycle_in_specs_is_detected(tmp_path, line):
    (tmp_path / "specs").mkdir()
    (tmp_path / "specs/a.py").write_text("def f():\n    from .b import g\n")
    (tmp_path / "specs/b.py").write_text(line)
    assert specs_circle(tmp_path) == ["a", "b", "a"]


def test_c_plus_plus_files_include_only_the_layers_below():
    assert include_errors(REPOSITORY) == []


def test_no_part_of_the_cache_includes_a_later_part():
    assert cache_errors(REPOSITORY) == []


@pytest.mark.parametrize(
    ("name", "line", "error"),
    [
        ("tier_ops.h", '#include "cache/requests.h"', "tier_ops.h: must not include cache/requests.h"),
        (
            "host_chunks.cc",
            '#include "cache/tier_ops.h"',
            "host_chunks.cc: must not include cache/tier_ops.h",
        ),
        (
            "planner.cc",
            '#include "cache/tiered_cache.h"',
            "planner.cc: must not include cache/tiered_cache.h",
        ),
        ("cache_impl.h", "", "cache_impl.h: is not listed in CACHE_PARTS"),
    ],
)
def test_a_cache_part_that_includes_a_later_one_is_detected(tmp_path, name, line, error):
    (tmp_path / "csrc/cache").mkdir(parents=True)
    (tmp_path / "csrc/cache" / name).write_text(f'#include "cache/cache_types.h"\n{line}\n')
    assert cache_errors(tmp_path) == [error]


def test_no_part_of_the_fs_store_includes_a_later_part():
    assert fs_errors(REPOSITORY) == []


@pytest.mark.parametrize(
    ("name", "header"),
    [
        ("known_records.h", "storage/fs/evictor.h"),
        ("record_reader.cc", "storage/fs/record_writer.h"),
        ("recency.h", "storage/fs/store.h"),
        ("space.cc", "storage/fs/known_records.h"),
    ],
)
def test_an_fs_store_part_that_includes_a_later_one_is_detected(tmp_path, name, header):
    (tmp_path / "csrc/storage/fs").mkdir(parents=True)
    (tmp_path / "csrc/storage/fs" / name).write_text(
        f'#include "storage/fs/open_root.h"\n#include "{header}"\n'
    )
    errors = fs_errors(tmp_path)
    assert f"{name}: must not include {header}" in errors


def test_only_the_adapter_imports_vllm():
    assert import_errors(REPOSITORY) == []


def test_every_layer_exists_and_is_checked():
    found = {p.parent.name for p in (REPOSITORY / "csrc").rglob("*") if p.suffix in SOURCES}
    assert set(LAYERS) <= found


@pytest.mark.parametrize(
    ("name", "line", "error"),
    [
        ("base/a.h", '#include "memory/host_region.h"', "base must not include memory/host_region.h"),
        ("memory/a.cc", '#include "index/chunk_index.h"', "memory must not include index/chunk_index.h"),
        (
            "storage/a.cc",
            "#  include <cache/tiered_cache.h>",
            "storage must not include cache/tiered_cache.h",
        ),
        ("copy/a.cc", '#include "storage/tier.h"', "copy must not include storage/tier.h"),
        ("cache/a.h", '#include "bindings/bindings.h"', "cache must not include bindings/bindings.h"),
        ("cache/a.h", '#include "../index/chunk_index.h"', "write ../index/chunk_index.h as <layer>/<file>"),
        ("copy/host_copier.cc", "#include <cuda_runtime.h>", "CUDA header cuda_runtime.h"),
        ("copy/plan.cc", "#include <cuda.h>", "CUDA header cuda.h"),
        ("cache/a.cc", "#include <torch/csrc/stable/library.h>", "torch header torch/csrc/stable/library.h"),
        ("bindings/module.cc", "#include <ATen/ATen.h>", "torch header ATen/ATen.h"),
        ("cache/a.cc", "#include <pybind11/pybind11.h>", "Python header pybind11/pybind11.h"),
        ("cache/a.cc", "#include <prometheus/counter.h>", "prometheus-cpp header prometheus/counter.h"),
        ("extra/a.h", "", "extra is not a layer"),
        (
            "storage/pooled_tier.cc",
            '#include "storage/fs/space.h"',
            "only bindings and storage/fs may include storage/fs/space.h",
        ),
        (
            "storage/redis/a.cc",
            '#include "storage/fs/file_ops.h"',
            "only bindings and storage/fs may include storage/fs/file_ops.h",
        ),
        (
            "cache/a.cc",
            '#include "storage/fs/tier.h"',
            "only bindings and storage/fs may include storage/fs/tier.h",
        ),
    ],
)
def test_a_planted_include_is_detected(tmp_path, name, line, error):
    path = tmp_path / "csrc" / name
    path.parent.mkdir(parents=True)
    path.write_text(f"{line}\n")
    assert include_errors(tmp_path) == [f"{name}: {error}"]


def test_a_second_file_that_pins_is_detected(tmp_path):
    (tmp_path / "csrc/memory").mkdir(parents=True)
    for name in ("pin.cc", "region.cc"):
        (tmp_path / "csrc/memory" / name).write_text("#include <cuda_runtime_api.h>\n")
    assert include_errors(tmp_path) == [
        "CUDA headers in several files of memory: memory/pin.cc, memory/region.cc"
    ]


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("copy/cuda_copier.cc", "#include <cuda_runtime.h>"),
        ("copy/pack_kernels.cu", "#include <cuda_runtime.h>"),
        ("memory/pin.cc", "#include <cuda_runtime_api.h>"),
        ("bindings/torch_ops.cc", "#include <torch/csrc/stable/library.h>"),
        ("cache/a.cc", '#include "storage/tier.h"'),
        ("storage/fs/a.cc", '#include "storage/fs/space.h"'),
        ("storage/fs/a.cc", '#include "storage/record_store.h"'),
        ("bindings/a.cc", '#include "storage/fs/tier.h"'),
        ("cache/a.cc", "#include <cstdint>"),
    ],
)
def test_includes_allowed_by_the_diagram_pass(tmp_path, name, line):
    path = tmp_path / "csrc" / name
    path.parent.mkdir(parents=True)
    path.write_text(f"{line}\n")
    assert include_errors(tmp_path) == []


@pytest.mark.parametrize(
    "source",
    [
        "import vllm\n",
        "from vllm.v1 import core\n",
        "def f():\n    import vllm.config\n",
        "import torch\n",
        "from kv_offload import specs\n",
        "from kv_offload.specs.spec import KVOffloadSpec\n",
    ],
)
def test_a_planted_import_is_detected(tmp_path, source):
    (tmp_path / "kv_offload").mkdir()
    (tmp_path / "kv_offload/cli.py").write_text(source)
    assert import_errors(tmp_path)


@pytest.mark.parametrize(
    "source", ["from kv_offload.config import OffloadConfig\n", "import kv_offload.cli\n"]
)
def test_a_kind_of_tier_does_not_import_its_callers(tmp_path, source):
    (tmp_path / "kv_offload/tiers").mkdir(parents=True)
    (tmp_path / "kv_offload/tiers/fs.py").write_text(source)
    assert import_errors(tmp_path)
