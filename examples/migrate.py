# SPDX-License-Identifier: Apache-2.0
"""Converts a configuration of vLLM's CPUOffloadingSpec or TieringOffloadingSpec to this plugin.

    python examples/migrate.py < before.json > after.json

Reads the value of ``--kv-transfer-config`` and writes the new one. It changes only ``spec_name`` (and
``spec_module_path``), and gives each directory a size limit, which vLLM's own tier does not have. Reports
unneeded and unknown keys on stderr. Exit status: 0 written; 1 the configuration is invalid here.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from kv_offload.config import ConfigError, OffloadConfig
from kv_offload.vllm_verdict import read_json


def migrate(before: Any, max_bytes: str = "100GiB") -> tuple[dict[str, Any], list[str]]:
    """Returns (the new configuration, notes about it). Raises ConfigError if it is invalid here."""
    extra = before.get("kv_connector_extra_config", {}) if isinstance(before, dict) else None
    if not isinstance(extra, dict):
        raise ConfigError(["it is not a table with a table kv_connector_extra_config"])
    extra = extra | {"spec_name": "KVOffloadSpec", "spec_module_path": "kv_offload.specs"}
    tiers = extra.get("secondary_tiers", [])
    if isinstance(tiers, list):  # otherwise OffloadConfig reports the problem
        extra["secondary_tiers"] = [_bounded(tier, max_bytes) for tier in tiers]
    _, notes = OffloadConfig.parse(extra)
    return {**before, "kv_connector_extra_config": extra}, notes


def _bounded(tier: Any, max_bytes: str) -> Any:
    is_directory = isinstance(tier, dict) and tier.get("type") == "fs"
    return {"max_bytes": max_bytes} | tier if is_directory else tier


def main() -> int:
    try:
        after, notes = migrate(read_json(sys.stdin.read()))
    except ConfigError as error:
        print(f"migrate: {error}", file=sys.stderr)
        return 1
    except ValueError as error:  # UnicodeDecodeError too
        print(f"migrate: the input is not JSON: {error}", file=sys.stderr)
        return 1
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    print(json.dumps(after, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
