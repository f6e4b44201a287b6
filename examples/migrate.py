"""From vLLM's own CPUOffloadingSpec or TieringOffloadingSpec: the same configuration, another spec name.

    python examples/migrate.py < before.json > after.json

Reads the value of ``--kv-transfer-config`` and writes the new one. All that changes is ``spec_name`` (and
``spec_module_path``), and that each directory gets a bound, which vLLM's own tier does not have. What is not
needed or not known is said on stderr.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from kv_offload.config import OffloadConfig


def migrate(before: dict[str, Any], max_bytes: str = "100GiB") -> tuple[dict[str, Any], list[str]]:
    """(the new configuration, what to know about it). Raises ConfigError for what is not valid here."""
    extra = dict(before.get("kv_connector_extra_config", {}))
    extra |= {"spec_name": "KVOffloadSpec", "spec_module_path": "kv_offload.specs"}
    extra["secondary_tiers"] = [
        {"max_bytes": max_bytes} | tier if tier.get("type") == "fs" else tier
        for tier in extra.get("secondary_tiers", [])
    ]
    _, notes = OffloadConfig.parse(extra)
    return {**before, "kv_connector_extra_config": extra}, notes


def main() -> None:
    after, notes = migrate(json.load(sys.stdin))
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    print(json.dumps(after, indent=2))


if __name__ == "__main__":
    main()
