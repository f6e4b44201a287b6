# SPDX-License-Identifier: Apache-2.0
"""Checks whether vLLM accepts a ``--kv-transfer-config``.

If vLLM is installed, its own parser and factories check it in a separate process, because importing them
takes seconds and loads torch. Otherwise the rules of the supported releases apply.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

CONNECTOR = "OffloadingConnector"
# vLLM: --kv-offloading-size selects this connector if the variable is set to a number other than 0.
SIMPLE_CONNECTOR, SIMPLE_VARIABLE = "SimpleCPUOffloadConnector", "VLLM_USE_SIMPLE_KV_OFFLOAD"
# Our subclass of it, which vLLM finds only by its module.
REPORTING_CONNECTOR, REPORTING_MODULE = "ReportingConnector", "kv_offload.specs.connector"

# Fields of KVTransferConfig; a test compares them with vLLM's.
ROLES = ("kv_producer", "kv_both", "kv_consumer")
FAILURE_POLICIES = ("recompute", "fail")
FIELDS = (
    "kv_connector",
    "engine_id",
    "kv_buffer_device",
    "kv_role",
    "kv_port",
    "kv_connector_extra_config",
    "kv_connector_module_path",
    "enable_permute_local_kv",
    "kv_load_failure_policy",
)
REMOVED_FIELDS = ("kv_buffer_size", "kv_rank", "kv_parallel_size", "kv_ip")  # removed after 0.31

JUDGE_TIMEOUT_SECONDS = 300.0
_NUMBER = re.compile(r"\b(\d+(?:\.\d+)?)([kKmMgGtT])\b")
_STRING = re.compile(r'("(?:[^"\\]|\\.)*")')
_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}

# Reads a list of [configuration, effective configuration] and prints a list of problems for each.
_PROGRAM = """
import contextlib, json, sys
given = json.load(sys.stdin)
with contextlib.redirect_stdout(sys.stderr):
    from pydantic import TypeAdapter, ValidationError
    from vllm.config.kv_transfer import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.plugins import load_general_plugins
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory
    load_general_plugins()

    def sentence(error):
        return f"{type(error).__name__}: {error}" if not isinstance(error, ValueError) else str(error)

    def parsed(config, problems):
        try:
            return TypeAdapter(KVTransferConfig).validate_python(config)
        except ValidationError as error:
            for each in error.errors():
                where = ".".join(map(str, each["loc"]))
                problems.append([where, each["type"], each["msg"], repr(each["input"])[:200]])
        return None

    def judge(config, in_effect):
        problems = []
        if parsed(config, problems) is None or in_effect is None:
            return problems
        made = parsed(in_effect, problems)
        if made is None or made.kv_connector is None:
            return problems
        try:
            KVConnectorFactory.get_connector_class(made)
            extra = made.kv_connector_extra_config
            if made.kv_connector == "MultiConnector":
                children = [KVTransferConfig(**child, engine_id="engine") for child in extra["connectors"]]
            else:
                children = [made]
            for child in children:
                connector = KVConnectorFactory.get_connector_class(child)
                if connector.__name__ in ("OffloadingConnector", "ReportingConnector"):
                    OffloadingSpecFactory.get_spec_cls(child.kv_connector_extra_config)
        except Exception as error:
            problems.append(["", "", sentence(error), ""])
        return problems

    verdicts = [judge(*each) for each in given]
print(json.dumps(verdicts))
"""


class Unasked(Exception):
    """vLLM is installed, but could not check; the text gives the reason."""


def read_json(text: str) -> Any:
    """Parses JSON like vLLM's command line: 80m is 80 million, 80M is 80 MiB. Raises ValueError."""
    parts = _STRING.split(text)
    parts[::2] = [_NUMBER.sub(_expanded, part) for part in parts[::2]]
    return json.loads("".join(parts))


def _expanded(found: re.Match[str]) -> str:
    number, unit = found.groups()
    if unit in _DECIMAL:
        return str(int(float(number) * _DECIMAL[unit]))
    if "." in number:
        raise ValueError(f"{found.group()}: no decimals before {unit}; did you mean {number}{unit.lower()}?")
    return str(int(number) * _BINARY[unit])


def is_transfer_config(given: Mapping[str, Any]) -> bool:
    """True if it is a whole ``--kv-transfer-config``, not only its ``kv_connector_extra_config``."""
    return any(name in given for name in (*FIELDS, *REMOVED_FIELDS))


def with_offloading_size(given: Mapping[str, Any], gib: float) -> tuple[dict[str, Any], list[str]]:
    """Returns the configuration that vLLM uses with ``--kv-offloading-size``, and the settings it
    overwrites."""
    extra = given.get("kv_connector_extra_config") or {}
    size = gib * (1 << 30)
    is_simple = os.environ.get(SIMPLE_VARIABLE, "0") != "0"
    connector = SIMPLE_CONNECTOR if is_simple else CONNECTOR
    notes = [
        f"--kv-offloading-size overwrites {name}: {value!r} is not used, {now!r} is"
        for name, value, now in (
            ("kv_connector", given.get("kv_connector"), connector),
            ("kv_role", given.get("kv_role"), "kv_both"),
            ("cpu_bytes_to_use", extra.get("cpu_bytes_to_use"), f"{gib:g}GiB"),
        )
        if value not in (None, now)
    ]
    if is_simple:
        notes.append(
            f"--kv-offloading-size selects {SIMPLE_CONNECTOR} because {SIMPLE_VARIABLE} is set: unset it"
        )
    in_effect = {
        **given,
        "kv_connector": connector,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {**extra, "cpu_bytes_to_use": size},
    }
    return in_effect, notes


def problems_of(given: Mapping[str, Any], in_effect: Mapping[str, Any] | None) -> list[str]:
    """Returns why vLLM refuses ``given``, or ``in_effect``, the effective configuration (None: not checked).

    Raises Unasked.
    """
    if find_spec("vllm") is None:
        return _judge_in_process(given)
    return judge_in_subprocess([(given, in_effect)])[0]


def judge_in_subprocess(
    given: Sequence[tuple[Mapping[str, Any], Mapping[str, Any] | None]],
) -> list[list[str]]:
    """Returns the problems that the installed vLLM reports for each, from one process. Raises Unasked."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM],
            input=json.dumps(given),
            capture_output=True,
            text=True,
            timeout=JUDGE_TIMEOUT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unasked(f"vLLM's parser cannot be run: {error}") from None
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or [f"status {done.returncode}"]
        raise Unasked(f"vLLM's parser failed: {last[0]}")
    return [[_sentence(*each) for each in problems] for problems in json.loads(done.stdout)]


def _sentence(where: str, kind: str, message: str, given: str) -> str:
    message = message.removeprefix("Value error, ")
    if kind == "unexpected_keyword_argument":
        return _unknown(where)
    if not where:
        return f"vLLM refuses it: {message}"
    return f"{where} is {given}: {message.replace('Input should', 'it should')}"


def _unknown(name: str) -> str:
    return f"{name!r} is not a key of --kv-transfer-config; possible: {', '.join(FIELDS)}"


def _judge_in_process(given: Mapping[str, Any]) -> list[str]:
    """Applies the rules of KVTransferConfig of the supported releases, also to children of a
    MultiConnector."""
    extra = given.get("kv_connector_extra_config")
    children = extra.get("connectors") if given.get("kv_connector") == "MultiConnector" and extra else None
    problems = []
    for each in (given, *(children if isinstance(children, list) else ())):
        if isinstance(each, Mapping):
            problems += _judged_alone(each)
    return problems


def _judged_alone(given: Mapping[str, Any]) -> list[str]:
    problems = [_unknown(str(name)) for name in given if name not in (*FIELDS, *REMOVED_FIELDS)]
    # These are the checks of vLLM's own class, for machines without vLLM.
    role, policy = given.get("kv_role"), given.get("kv_load_failure_policy", "fail")
    if role is not None and role not in ROLES:
        problems.append(f"kv_role is {role!r}; it should be {_either(ROLES)}")
    if role is None and given.get("kv_connector") is not None:
        problems.append(f"kv_role is needed with kv_connector: {_either(ROLES)}")
    if policy not in FAILURE_POLICIES:
        problems.append(f"kv_load_failure_policy is {policy!r}; it should be {_either(FAILURE_POLICIES)}")
    kinds = (
        ("kv_connector", str),
        ("engine_id", str),
        ("kv_buffer_device", str),
        ("kv_connector_module_path", str),
    )
    for name, kind in kinds:
        value = given.get(name)
        if value is not None and not isinstance(value, kind):
            problems.append(f"{name} is {value!r}; it should be a string")
    try:
        # vLLM also accepts a number as text.
        int(given.get("kv_port", 0))
    except (TypeError, ValueError):
        problems.append(f"kv_port is {given['kv_port']!r}; it should be a number")
    if not isinstance(given.get("kv_connector_extra_config", {}), Mapping):
        problems.append("kv_connector_extra_config is not a table of keys and values")
    return problems


def _either(words: Sequence[str]) -> str:
    return ", ".join(map(repr, words[:-1])) + f" or {words[-1]!r}"
