# SPDX-License-Identifier: Apache-2.0
"""Configuration checks of ``kv-offload doctor``: vLLM accepts it, and this plugin would serve."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kv_offload import vllm_verdict
from kv_offload.cli.doctor_checks import Check
from kv_offload.config import ConfigError, OffloadConfig, several_hosts_problem
from kv_offload.config_compat import is_llmd_config, own_extra_config
from kv_offload.machine import cautions
from kv_offload.names import SPEC_MODULE, SPEC_NAME

_PARTIAL = (
    "kv_connector is missing: vLLM offloads nothing unless it is started with --kv-offloading-size. "
    "Give doctor the same --kv-offloading-size to check the whole configuration"
)


@dataclass(frozen=True)
class Judged:
    """``config``: our part as vLLM would apply it; None if it would not apply or is invalid. ``tiers``: the
    same, even if only the size of host memory is missing."""

    checks: list[Check]
    config: OffloadConfig | None = None
    tiers: OffloadConfig | None = None


def judge(given: Mapping[str, Any], offloading_gib: float | None = None, hosts: int = 1) -> Judged:
    """Checks ``given``: all of ``--kv-transfer-config``, or only our part. ``offloading_gib``: the value of
    ``--kv-offloading-size``. ``hosts``: number of hosts of the engine."""
    transfer = given
    if not vllm_verdict.is_transfer_config(given):
        transfer = {
            "kv_connector": vllm_verdict.CONNECTOR,
            "kv_role": "kv_both",
            "kv_connector_extra_config": given,
        }
    in_effect: Mapping[str, Any] = transfer
    notes: list[str] = []
    if offloading_gib is not None:
        in_effect, notes = vllm_verdict.with_offloading_size(transfer, offloading_gib)
    extra, refused = own_extra_config(in_effect)
    partial = transfer.get("kv_connector") is None and "cpu_bytes_to_use" not in extra
    if in_effect.get("kv_connector") is None and not partial:
        refused.append('kv_connector is missing, so vLLM would offload nothing: set "OffloadingConnector"')
    refused += _plugin_not_used(in_effect, extra, refused)
    checks = _vllms_verdict(transfer, None if refused else in_effect)
    checks += [Check("config", "refused", text) for text in refused]
    checks += [Check("config", "note", text) for text in notes]
    if refused and not is_llmd_config(extra) and extra.get("spec_name") is not None:
        return Judged(checks)
    known = {"cpu_bytes_to_use": "1GiB"} if partial and offloading_gib is None else {}
    try:
        parsed, ignored = OffloadConfig.parse({**extra, **known})
    except ConfigError as error:
        return Judged([*checks, *(Check("config", "refused", text) for text in error.problems)])
    if refused:  # all parts were checked, and none would take effect
        return Judged(checks)
    checks += [Check("config", "note", text) for text in (*ignored, *cautions(parsed))]
    of_vllm = ["canonical_layout"] if extra.get("canonical_layout") else []
    if problem := several_hosts_problem(parsed, hosts, of_vllm):
        checks.append(Check("config", "refused", problem))
    if known:
        return Judged([*checks, Check("config", "note", _PARTIAL)], tiers=parsed)
    return Judged(checks, parsed, parsed)


def _plugin_not_used(in_effect: Mapping[str, Any], extra: Mapping[str, Any], refused: list[str]) -> list[str]:
    """Returns why vLLM would start, but serve without this plugin."""
    module = in_effect.get("kv_connector_module_path")
    if in_effect.get("kv_connector") == vllm_verdict.REPORTING_CONNECTOR and not module:
        return [
            f"kv_connector is {vllm_verdict.REPORTING_CONNECTOR!r}, which vLLM cannot find by itself: set "
            f'kv_connector_module_path "{vllm_verdict.REPORTING_MODULE}"'
        ]
    spec = extra.get("spec_name")
    if refused or spec == SPEC_NAME or is_llmd_config(extra):
        return []
    return [
        f'spec_name is {spec!r}: vLLM would use its own spec; set "{SPEC_NAME}", and spec_module_path '
        f'"{SPEC_MODULE}" (examples/migrate.py does)'
    ]


def _vllms_verdict(transfer: Mapping[str, Any], in_effect: Mapping[str, Any] | None) -> list[Check]:
    try:
        problems = vllm_verdict.problems_of(transfer, in_effect)
    except vllm_verdict.Unasked as error:
        return [Check("config", "note", f"vLLM could not check it: {error}")]
    return [Check("config", "refused", text) for text in problems]
