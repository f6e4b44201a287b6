# SPDX-License-Identifier: Apache-2.0
"""The layers: which folder, and where folders are too coarse which file, may include or import which other.

base <- policy, memory, record, copy, metrics <- index, tier <- cache, backends <- worker, hosts, replay
     <- bindings <- kv_offload <- specs

A backend is a folder of csrc/backends. No other layer includes its headers, and no backend those of another.
Its binding, backends/*/bind_*.cc, belongs to the bindings.
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
    "record": {"base"},
    "copy": {"base"},
    "metrics": {"base"},
    "index": {"base", "policy"},
    "tier": {"base", "policy", "record"},
    "backends": {"base", "policy", "record", "tier"},
    "cache": {"base", "policy", "memory", "index", "record", "tier", "metrics"},
    "worker": {"base", "memory", "copy", "metrics"},
    "hosts": {"base", "policy", "memory", "record", "tier"},
    "replay": {"base", "policy", "index", "cache"},
}
LAYERS["bindings"] = set(LAYERS)

# Each part of a folder may include only those before it. Where LEAVES is set, files that are not listed are
# functions that several parts use: they include no part.
PARTS = {
    # in the order of record/record_form.h
    "record": (
        *("context_pool", "shard_blocks", "zstd_frames", "split_planes", "payload_codec"),
        *("group_quantizer", "row_coder", "kv_runs", "bound_factors", "lossy_section", "lossy_codec"),
        *("record", "encryption", "record_op", "huge_buffer", "idle_cores"),
        "whole_record",
        *("compression_choice", "measure_codec", "record_form", "streaming_record_reader"),
    ),
    # in the order of tier/thread_pool_tier.h
    "tier": (
        *("tier", "presence", "record_store", "epoch_registry", "existence_check_policy", "remote_records"),
        *("circuit_breaker", "ticker", "io_pool", "digest_cache", "digest_key_map"),
        *("thread_pool_tier", "tier_runtime", "presence_lookup", "encrypted_key_tier"),
        "record_importer",
    ),
    # in the order of cache/tiered_cache.h
    "cache": (
        "cache_types",
        *("chunk_groups", "tickets", "cache_events", "key_history", "quarantine", "neighbours", "lent_rows"),
        *("prefill_model", "transfer_model", "cost_model"),
        *("host_chunks", "tier_figures", "tier_io", "planned_reads"),
        *("write_back", "row_provider", "device_loads"),
        *("request_state", "request_table", "lookup", "pass_scans", "planner", "store_path"),
        *("hint_trust", "prefetcher", "retention", "sessions"),
        "tiered_cache",
    ),
    # in the order of backends/fs/store.h
    "backends/fs": (
        *("open_root", "root_files", "open", "record_index", "pending_record", "shares"),
        *("evictor", "record_reader", "record_writer", "scanner", "peer_records", "usage_scanner"),
        *("epoch_manager", "root_repairer", "recency"),
        *("store", "tier", "probe_disk", "bind_fs"),
    ),
}
LEAVES = {"backends/fs"}
# Implementations that include a part after their own, because the class of their header owns it.
PART_EXCEPTIONS = {
    ("tier/thread_pool_tier.cc", "tier/tier_runtime.h"),
    ("tier/thread_pool_tier.cc", "tier/presence_lookup.h"),
}
OPTIONS = {"backends/fs/tier.h"}  # the options of the tier, which each of its parts may include

# The headers of libraries, and the files (under csrc/) that may include them.
LIBRARIES = {
    "CUDA": (
        r"(cuda|cub|thrust|cooperative_groups|nvml|device_launch)\b|cuda[_a-zA-Z]*\.h",
        r"copy/(cuda_.*|.*\.cuh?)",
    ),
    "torch": (r"(torch|ATen|c10|caffe2)/", r"bindings/torch_.*"),
    "Python": (r"(pybind11/|Python\.h)", r"bindings/(?!torch_).*|backends/\w+/bind_\w+\.cc"),
    "prometheus-cpp": (r"prometheus/", r"metrics/.*"),
    "xxhash": (r"xxh", r"base/xxh3\.h"),
    "zstd": (r"zstd", r"record/zstd_frames\.cc"),
    "libvalkey": (r"valkey/", r"backends/redis/(connection|tls)\.cc"),
    "OpenSSL": (
        r"openssl/",
        r"(backends/redis/tls|backends/s3/signature|record/encryption|tier/encrypted_key_tier)\.cc",
    ),
    "libcurl": (r"curl/", r"nowhere: it is loaded at run time, and a build needs none of its headers"),
}

# A replay evicts in the order of an fs tier, which is that of its catalog.
BACKEND_INCLUDES = {("replay/trace_replay.cc", "backends/fs/catalog.h")}

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)
SOURCES = {".h", ".cc", ".cu", ".cuh"}


def sources(root: Path) -> list[tuple[str, Path]]:
    csrc = root / "csrc"
    return [(p.relative_to(csrc).as_posix(), p) for p in sorted(csrc.rglob("*")) if p.suffix in SOURCES]


def layer_of(name: str) -> str:
    layer, _, file = name.partition("/")
    return "bindings" if layer == "backends" and Path(file).name.startswith("bind_") else layer


def backend_of(name: str) -> str:
    """Returns the backend of a file: fs for backends/fs/space_ledger.h; empty for other files."""
    parts = name.split("/")
    return parts[1] if parts[0] == "backends" and len(parts) == 3 else ""


def include_errors(root: Path) -> list[str]:
    errors = []
    pinning = []
    for name, path in sources(root):
        layer = layer_of(name)
        if layer not in LAYERS or (layer == "backends" and not backend_of(name)):
            errors.append(f"{name}: {'is in no backend' if layer in LAYERS else layer + ' is no layer'}")
            continue
        for quote, header in INCLUDE.findall(path.read_text()):
            target = header.partition("/")[0] if "/" in header else ""  # <memory> is not memory/
            if quote == '"' and target not in LAYERS:
                errors.append(f"{name}: write {header} as <layer>/<file>")
            elif backend_of(header):
                own = backend_of(header) == backend_of(name)
                if not own and layer != "bindings" and (name, header) not in BACKEND_INCLUDES:
                    kind = backend_of(header)
                    errors.append(f"{name}: only bindings and backends/{kind} may include {header}")
            elif target in LAYERS and target != layer and target not in LAYERS[layer]:
                errors.append(f"{name}: {layer} must not include {header}")
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


def part_errors(root: Path, folder: str) -> list[str]:
    """Returns an error for each file of a folder that is not listed, or includes a part after its own."""
    parts = PARTS[folder]
    errors = []
    for name, path in sources(root):
        if name.rpartition("/")[0] != folder:
            continue
        if path.stem not in parts and folder not in LEAVES:
            errors.append(f"{path.name}: is not listed in PARTS")
            continue
        place = parts.index(path.stem) if path.stem in parts else -1
        for _, header in INCLUDE.findall(path.read_text()):
            of, _, file = header.rpartition("/")
            stem = file.removesuffix(".h")
            if of != folder or header in OPTIONS or (name, header) in PART_EXCEPTIONS:
                continue
            if (stem in parts and parts.index(stem) > place) or (stem not in parts and folder not in LEAVES):
                errors.append(f"{path.name}: must not include {header}")
    return errors


def cycle(edges: dict[str, set[str]]) -> list[str]:
    """Returns the nodes of a cycle, in order and closed; empty if there is none."""

    def follow(path: list[str]) -> list[str]:
        for node in sorted(edges[path[-1]]):
            if node in path:
                return [*path[path.index(node) :], node]
            if node not in cleared and (found := follow([*path, node])):
                return found
        cleared.add(path[-1])
        return []

    cleared: set[str] = set()
    return next((found for node in sorted(edges) if (found := follow([node]))), [])


def include_cycle(root: Path) -> list[str]:
    headers = {name: path for name, path in sources(root) if path.suffix in {".h", ".cuh"}}
    return cycle(
        {
            name: {header for _, header in INCLUDE.findall(path.read_text()) if header in headers}
            for name, path in headers.items()
        }
    )


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
    """Returns forbidden imports, also those within functions and those for type checkers only."""
    errors = []
    package = root / "kv_offload"
    for path in sorted(package.rglob("*.py")):
        for module in sorted(imported_modules(path)):
            forbidden = module.split(".")[0] in ("vllm", "torch", "specs") or module.startswith(
                "kv_offload.specs"
            )
            if path.parent != package and path.relative_to(package).parts[0] == "tiers":
                # The types of tiers are below the modules that use them.
                forbidden |= module.startswith(("kv_offload.cli", "kv_offload.config", "kv_offload.machine"))
            if forbidden and (path.name, module) not in (
                ("torch_ops.py", "torch"),
                ("sensitivity.py", "torch"),
            ):
                errors.append(f"{path.relative_to(root).as_posix()}: imports {module}")
    return errors


def import_cycle(root: Path, package: str) -> list[str]:
    """Returns the modules of a package that import each other in a cycle, in order; empty if there is none.

    Imports within functions count, and so do those for type checkers only.
    """
    modules = {}
    for path in (root / package).rglob("*.py"):
        module = ".".join(path.relative_to(root).with_suffix("").parts)
        modules[module.removesuffix(".__init__")] = path

    def imported(name: str) -> set[str]:
        path = modules[name]
        parent = name if path.name == "__init__.py" else name.rpartition(".")[0]
        found = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                start = parent.split(".")[: len(parent.split(".")) - node.level + 1] if node.level else []
                module = ".".join([*start, *([node.module] if node.module else [])])
                each = {f"{module}.{alias.name}" for alias in node.names}
                found |= (each & set(modules)) | ({module} if each - set(modules) else set())
        return (found & set(modules)) - {name, package}

    # A package runs before its modules and may import them, so it is not part of a cycle.
    return cycle({name: imported(name) for name in modules if name != package})


def test_c_plus_plus_files_include_only_the_layers_below():
    assert include_errors(REPOSITORY) == []


@pytest.mark.parametrize("folder", sorted(PARTS))
def test_no_part_of_a_folder_includes_a_later_one(folder):
    assert part_errors(REPOSITORY, folder) == []


@pytest.mark.parametrize("folder", sorted(PARTS))
def test_every_part_exists(folder):
    assert {path.stem for path in (REPOSITORY / "csrc" / folder).iterdir()} >= set(PARTS[folder])


def test_no_headers_include_each_other_in_a_cycle():
    assert include_cycle(REPOSITORY) == []


@pytest.mark.parametrize("package", ["kv_offload", "specs"])
def test_no_modules_import_each_other_in_a_cycle(package):
    assert import_cycle(REPOSITORY, package) == []


def test_only_the_adapter_imports_vllm():
    assert import_errors(REPOSITORY) == []


def test_every_layer_has_files():
    assert {layer_of(name) for name, _ in sources(REPOSITORY)} == set(LAYERS)


@pytest.mark.parametrize(
    ("name", "line", "error"),
    [
        ("base/a.h", '#include "memory/host_region.h"', "base must not include memory/host_region.h"),
        ("memory/a.cc", '#include "index/chunk_index.h"', "memory must not include index/chunk_index.h"),
        ("tier/a.cc", "#  include <cache/tiered_cache.h>", "tier must not include cache/tiered_cache.h"),
        ("record/a.h", '#include "tier/tier.h"', "record must not include tier/tier.h"),
        ("copy/a.cc", '#include "tier/tier.h"', "copy must not include tier/tier.h"),
        ("worker/a.cc", '#include "cache/tiered_cache.h"', "worker must not include cache/tiered_cache.h"),
        ("cache/a.cc", '#include "replay/trace_replay.h"', "cache must not include replay/trace_replay.h"),
        ("cache/a.h", '#include "bindings/bindings.h"', "cache must not include bindings/bindings.h"),
        (
            "backends/s3/a.cc",
            '#include "bindings/bindings.h"',
            "backends must not include bindings/bindings.h",
        ),
        ("cache/a.h", '#include "../index/chunk_index.h"', "write ../index/chunk_index.h as <layer>/<file>"),
        ("copy/host_copier.cc", "#include <cuda_runtime.h>", "CUDA header cuda_runtime.h"),
        ("copy/plan.cc", "#include <cuda.h>", "CUDA header cuda.h"),
        ("cache/a.cc", "#include <torch/csrc/stable/library.h>", "torch header torch/csrc/stable/library.h"),
        ("bindings/module.cc", "#include <ATen/ATen.h>", "torch header ATen/ATen.h"),
        ("cache/a.cc", "#include <pybind11/pybind11.h>", "Python header pybind11/pybind11.h"),
        ("backends/s3/tier.cc", "#include <pybind11/pybind11.h>", "Python header pybind11/pybind11.h"),
        ("cache/a.cc", "#include <prometheus/counter.h>", "prometheus-cpp header prometheus/counter.h"),
        ("extra/a.h", "", "extra is no layer"),
        ("backends/a.h", "", "is in no backend"),
        (
            "tier/thread_pool_tier.cc",
            '#include "backends/fs/space_ledger.h"',
            "only bindings and backends/fs may include backends/fs/space_ledger.h",
        ),
        (
            "backends/redis/a.cc",
            '#include "backends/fs/file_ops.h"',
            "only bindings and backends/fs may include backends/fs/file_ops.h",
        ),
        (
            "cache/a.cc",
            '#include "backends/fs/tier.h"',
            "only bindings and backends/fs may include backends/fs/tier.h",
        ),
    ],
)
def test_a_planted_include_is_reported(tmp_path, name, line, error):
    path = tmp_path / "csrc" / name
    path.parent.mkdir(parents=True)
    path.write_text(f"{line}\n")
    assert include_errors(tmp_path) == [f"{name}: {error}"]


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("copy/cuda_copier.cc", "#include <cuda_runtime.h>"),
        ("copy/pack_kernels.cu", "#include <cuda_runtime.h>"),
        ("memory/pin.cc", "#include <cuda_runtime_api.h>"),
        ("bindings/torch_ops.cc", "#include <torch/csrc/stable/library.h>"),
        ("cache/a.cc", '#include "tier/tier.h"'),
        ("backends/fs/a.cc", '#include "backends/fs/space_ledger.h"'),
        ("backends/fs/a.cc", '#include "tier/record_store.h"'),
        ("backends/fs/bind_fs.cc", '#include "bindings/bindings.h"'),
        ("backends/fs/bind_fs.cc", "#include <pybind11/pybind11.h>"),
        ("bindings/a.cc", '#include "backends/fs/tier.h"'),
        ("cache/a.cc", "#include <cstdint>"),
    ],
)
def test_an_allowed_include_passes(tmp_path, name, line):
    path = tmp_path / "csrc" / name
    path.parent.mkdir(parents=True)
    path.write_text(f"{line}\n")
    assert include_errors(tmp_path) == []


def test_a_second_file_that_pins_is_reported(tmp_path):
    (tmp_path / "csrc/memory").mkdir(parents=True)
    for name in ("pin.cc", "region.cc"):
        (tmp_path / "csrc/memory" / name).write_text("#include <cuda_runtime_api.h>\n")
    assert include_errors(tmp_path) == [
        "CUDA headers in several files of memory: memory/pin.cc, memory/region.cc"
    ]


@pytest.mark.parametrize(
    ("name", "line", "error"),
    [
        ("cache/tier_io.h", '#include "cache/request_table.h"', "must not include cache/request_table.h"),
        ("cache/host_chunks.cc", '#include "cache/tier_io.h"', "must not include cache/tier_io.h"),
        ("cache/planner.cc", '#include "cache/tiered_cache.h"', "must not include cache/tiered_cache.h"),
        ("cache/cache_impl.h", "", "is not listed in PARTS"),
        ("record/encryption.h", '#include "record/record_form.h"', "must not include record/record_form.h"),
        ("tier/io_pool.cc", '#include "tier/tier_runtime.h"', "must not include tier/tier_runtime.h"),
        (
            "backends/fs/record_index.h",
            '#include "backends/fs/evictor.h"',
            "must not include backends/fs/evictor.h",
        ),
        (
            "backends/fs/record_reader.cc",
            '#include "backends/fs/record_writer.h"',
            "must not include backends/fs/record_writer.h",
        ),
        (
            "backends/fs/space_ledger.cc",
            '#include "backends/fs/record_index.h"',
            "must not include backends/fs/record_index.h",
        ),
    ],
)
def test_an_include_of_a_later_part_is_reported(tmp_path, name, line, error):
    path = tmp_path / "csrc" / name
    path.parent.mkdir(parents=True)
    path.write_text(f'#include "base/types.h"\n{line}\n')
    assert part_errors(tmp_path, name.rpartition("/")[0]) == [f"{path.name}: {error}"]


def test_headers_that_include_each_other_are_reported(tmp_path):
    (tmp_path / "csrc/base").mkdir(parents=True)
    for name, other in (("a", "b"), ("b", "c"), ("c", "a")):
        (tmp_path / f"csrc/base/{name}.h").write_text(f'#include "base/{other}.h"\n')
    assert include_cycle(tmp_path) == ["base/a.h", "base/b.h", "base/c.h", "base/a.h"]


@pytest.mark.parametrize(
    "line", ["from .a import f\n", "def g():\n    from . import a\n", "import specs.a\n"]
)
def test_modules_that_import_each_other_are_reported(tmp_path, line):
    (tmp_path / "specs").mkdir()
    (tmp_path / "specs/a.py").write_text("def f():\n    from .b import g\n")
    (tmp_path / "specs/b.py").write_text(line)
    assert import_cycle(tmp_path, "specs") == ["specs.a", "specs.b", "specs.a"]


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
def test_a_planted_import_is_reported(tmp_path, source):
    (tmp_path / "kv_offload").mkdir()
    (tmp_path / "kv_offload/cli.py").write_text(source)
    assert import_errors(tmp_path)


@pytest.mark.parametrize("place", ["tiers/fs.py", "tiers/redis/config.py"])
@pytest.mark.parametrize(
    "source", ["from kv_offload.config import OffloadConfig\n", "import kv_offload.cli\n"]
)
def test_a_type_of_tier_that_imports_its_users_is_reported(tmp_path, place, source):
    path = tmp_path / "kv_offload" / place
    path.parent.mkdir(parents=True)
    path.write_text(source)
    assert import_errors(tmp_path)
