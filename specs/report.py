# SPDX-License-Identifier: Apache-2.0
"""Formats the report on one request as a log line."""

from collections.abc import Mapping
from typing import Any


def report_text(report: Mapping[str, Any]) -> str:
    """Returns ``report``, a result of TieredCache.report, as one line of text.

    For example: 3072 tokens from fs, 128 tokens from cpu, 512 tokens missing (not_stored); load: loading
    estimated at 0.120 s against 0.800 s of computing; waited 0.131 s
    """
    found = [f"{tokens} tokens from {tier}" for tier, tokens in report["hit_tokens"].items()]
    missing = [f"{tokens} tokens missing ({reason})" for reason, tokens in report["miss_tokens"].items()]
    text = ", ".join(found + missing) or "no tokens looked up"
    if report["choice"]:
        text += f"; {report['choice']}: "
        # 0: the speed of the tier or of prefill is not known yet.
        if report["load_seconds"] and report["compute_seconds"]:
            text += (
                f"loading estimated at {report['load_seconds']:.3f} s against "
                f"{report['compute_seconds']:.3f} s of computing"
            )
        else:
            text += "speeds not known yet"
    if report["waited_seconds"]:
        text += f"; waited {report['waited_seconds']:.3f} s"
    if tenant := report.get("tenant"):
        text += f"; tenant {tenant}"
    if hints := report.get("hints"):
        text += "; hints: " + ", ".join(f"{hint['type']} {hint['outcome']}" for hint in hints)
    return text
