# SPDX-License-Identifier: Apache-2.0
"""csrc/bindings/bind_base.cc: sizes, policies, errors, and the interface that _core.pyi declares."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kv_offload
from kv_offload import _core

STUB = Path(__file__).resolve().parents[2] / "kv_offload/_core.pyi"


def test_the_version_is_that_of_the_package():
    assert _core.__version__ == kv_offload.__version__


def test_sizes_are_parsed_and_formatted():
    assert _core.parse_byte_size("1.5 KiB") == 1536
    assert _core.format_bytes(32 << 30) == "32.0 GiB"


def test_an_invalid_argument_is_a_value_error_that_names_it():
    with pytest.raises(ValueError, match="lots"):
        _core.parse_byte_size("lots")


def test_a_missing_resource_is_a_separate_runtime_error():
    assert issubclass(_core.ResourceError, RuntimeError)
    assert _core.ResourceError.__module__ == "kv_offload._core"


def test_lru_is_among_the_policies():
    assert "lru" in _core.eviction_policy_names()


def test_a_cuda_library_of_another_build_is_refused(tmp_path):
    core = Path(shutil.copy(_core.__file__, tmp_path))
    source = tmp_path / "library.c"
    source.write_text(
        """unsigned long kv_offload_cuda_interface(void) { return 3; }
        void *kv_offload_cuda_make_copier(void) { __builtin_trap(); }
        void kv_offload_cuda_unavailable_reason(char *message) { *message = 0; }
        int kv_offload_cuda_numa_node(void) { __builtin_trap(); }"""
    )
    library = tmp_path / "libkv_offload_cuda.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    program = f"""
from importlib import util
spec = util.spec_from_file_location("kv_offload._core", {str(core)!r})
core = util.module_from_spec(spec)
spec.loader.exec_module(core)
print(core.cuda_unavailable_reason(), core.cuda_numa_node(0))
"""
    said = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert said == f"{library} comes from a different build; install both from the same build -1\n"


def _promised() -> list[tuple[str, str]]:
    names = []
    for node in ast.parse(STUB.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            names.append(("", node.name))
        elif isinstance(node, ast.ClassDef):
            names.append(("", node.name))
            for member in node.body:
                if isinstance(member, ast.FunctionDef):
                    names.append((node.name, member.name))
                elif isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name):
                    names.append((node.name, member.target.id))
    return names


@pytest.mark.parametrize(("owner", "name"), _promised())
def test_everything_that_the_stub_declares_exists(owner, name):
    assert hasattr(getattr(_core, owner) if owner else _core, name)


def test_every_public_name_is_in_the_stub():
    promised = set(_promised())
    for name, value in vars(_core).items():
        if name.startswith("_"):
            continue
        assert ("", name) in promised or name == "tier_interface"  # a variable
        if isinstance(value, type) and not issubclass(value, Exception):
            for member in vars(value):
                assert member.startswith("_") or (name, member) in promised, f"{name}.{member}"


def _defaults() -> list[tuple[str, str, list[str]]]:
    """Returns (class, method, parameter names) of every method and function in the stub."""
    found = []
    for node in ast.parse(STUB.read_text()).body:
        functions = [node] if isinstance(node, ast.FunctionDef) else []
        if isinstance(node, ast.ClassDef):
            functions = [n for n in node.body if isinstance(n, ast.FunctionDef) and not n.decorator_list]
        owner = node.name if isinstance(node, ast.ClassDef) else ""
        for function in functions:
            names = [a.arg for a in function.args.args + function.args.kwonlyargs if a.arg != "self"]
            found.append((owner, function.name, names))
    return found


@pytest.mark.parametrize(("owner", "name", "parameters"), _defaults())
def test_parameters_are_named_as_in_the_stub(owner, name, parameters):
    bound = getattr(getattr(_core, owner) if owner else _core, name)
    signature = (bound.__doc__ or "").splitlines()[0] if bound.__doc__ else ""
    for parameter in parameters:
        assert f"{parameter}:" in signature, signature
