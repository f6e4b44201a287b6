# SPDX-License-Identifier: Apache-2.0
"""Run by test_contract.py under each vLLM release: the tables of the namespace name every field."""

import dataclasses
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import adapter
import vllm

adapter.use_specs()

from kv_offload.specs.identity_table import CONFIGURATION, ENVIRONMENT, VLLM_VARIABLES  # noqa: E402
from kv_offload.specs.resolved_settings import decision_for, environment  # noqa: E402
from vllm import envs  # noqa: E402
from vllm.config import VllmConfig  # noqa: E402


def configurations(annotation: Any) -> Iterator[Any]:
    """Yields vLLM's configuration classes that an annotation names."""
    if dataclasses.is_dataclass(annotation) and annotation.__module__.startswith("vllm.config"):
        yield annotation
    for part in typing.get_args(annotation):
        yield from configurations(part)


def paths(config: Any, section: str = "") -> Iterator[str]:
    hints = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        path = f"{section}.{field.name}".lstrip(".")
        decision = decision_for(path)
        inner = list(configurations(hints[field.name]))
        if not inner or (decision is not None and (decision.like or not decision.counts)):
            yield path
        for part in inner if decision is None or (decision.counts and not decision.like) else ():
            yield from paths(part, path)


def test_every_field_of_the_configuration_is_in_the_table() -> None:
    found = list(paths(VllmConfig))
    assert len(found) > 200
    assert [path for path in found if decision_for(path) is None] == []


def test_every_variable_of_vllm_is_in_the_table() -> None:
    assert sorted(envs.environment_variables.keys() - VLLM_VARIABLES.keys()) == []


_ACCESS = r"""(?:environ(?:\.get|\.setdefault|\.pop)?\s*[\[(]|getenv\()\s*"""
READ = re.compile(_ACCESS + r"""["']([A-Za-z_]\w*)["']|["']([A-Z][A-Z0-9_]+)["']\s+(?:not )?in os\.environ""")
READ_BY_CONSTANT = re.compile(_ACCESS + r"""(_?[A-Z][A-Z0-9_]+)\b""")
CONSTANT = re.compile(r"""^[ \t]*(_?[A-Z][A-Z0-9_]+)(?: *: *\w+)? = ["']([A-Za-z_]\w*)["']""", re.MULTILINE)


def test_every_variable_that_vllms_python_files_read_is_in_the_table() -> None:
    found, by_constant = set(), set()
    values: dict[str, set[str]] = {}  # of constants that other files import
    for file in Path(vllm.__file__).parent.rglob("*.py"):
        text = file.read_text(encoding="utf-8", errors="replace")
        found |= {first or second for first, second in READ.findall(text)}
        by_constant |= set(READ_BY_CONSTANT.findall(text))
        for name, value in CONSTANT.findall(text):
            values.setdefault(name, set()).add(value)
    assert len(found) > 100
    assert len(by_constant) > 2
    for name in by_constant:
        found |= values.get(name, {name})  # a variable of a library outside vLLM has its name as its value
    assert sorted(found - ENVIRONMENT.keys()) == []


def test_every_entry_of_the_table_has_a_reason() -> None:
    assert all(decision.reason for decision in (CONFIGURATION | VLLM_VARIABLES).values())


def test_a_variable_that_no_table_names_is_in_the_namespace() -> None:
    environ = {"VLLM_NEW": "1", "VLLM_SSM_CONV_STATE_LAYOUT": "DS", "VLLM_PORT": "1"}
    known = dict.fromkeys(("VLLM_NEW", "VLLM_PORT"))
    assert environment(environ, known) == {"VLLM_NEW": "1", "VLLM_SSM_CONV_STATE_LAYOUT": "DS"}
