# SPDX-License-Identifier: Apache-2.0
"""The checks of ``kv-offload doctor URL`` on the metrics page of a running server."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kv_offload.cli.doctor_checks import Check
from kv_offload.cli.server import PREFIX
from kv_offload.cli.why_command import as_sentence
from kv_offload.losses import largest_errors_text
from kv_offload.sizes import format_bytes

if TYPE_CHECKING:
    from kv_offload.exposition import Page


def server_checks(address: str, page: "Page") -> list[Check]:
    """Returns its version, its tiers, its hits, and the causes of its misses."""
    from kv_offload.diagnosis import from_metrics

    diagnosis = from_metrics(page)
    figures = {"hit_tokens": diagnosis.hit_tokens, "miss_tokens": diagnosis.miss_tokens}
    return [
        *_software(address, page),
        *_tiers(page),
        Check("loaded", "ok" if diagnosis.hit_tokens else "note", diagnosis.verdict, figures),
        *(
            Check(finding.cause, "note", f"{as_sentence(finding.text)} {as_sentence(finding.advice)}")
            for finding in diagnosis.findings
        ),
    ]


def _software(address: str, page: "Page") -> Iterator[Check]:
    engines = page.labels(f"{PREFIX}info")
    reports = [
        ", ".join(f"{key} {engine[key]}" for key in ("version", "namespace", "copier") if engine.get(key))
        for engine in engines
    ]
    text = "; ".join(dict.fromkeys(reports)) or "no engine has reported yet"
    yield Check("server", "ok" if reports else "note", f"{address}: {text}")
    for layout in dict.fromkeys(engine.get("layout", "") for engine in engines):
        _, kept_apart, reason = layout.partition(", kept apart: ")
        if kept_apart:
            yield Check(
                "layout",
                "note",
                "canonical_layout is not possible here, so records are not shared with other "
                f"tensor-parallel sizes: {reason}",
            )
        elif layout.endswith(", canonical"):
            yield Check("layout", "ok", "canonical: other tensor-parallel sizes share the records")


def _tiers(page: "Page") -> Iterator[Check]:
    for tier in page.values_of(f"{PREFIX}tier_capacity_bytes", "tier"):
        held, capacity = (page.sum(f"{PREFIX}tier_{name}", tier=tier) for name in ("bytes", "capacity_bytes"))
        tokens = page.sum(f"{PREFIX}tier_capacity_tokens", tier=tier)
        text = f"{format_bytes(int(held))} of {format_bytes(int(capacity))} in use"
        if tokens:
            text += f"; {tokens:,.0f} tokens fit into it"
        figures = {"bytes": held, "capacity_bytes": capacity, "capacity_tokens": tokens}
        keys, values = (
            page.max(f"{PREFIX}codec_largest_error", tier=tier, part=part) for part in ("keys", "values")
        )
        if keys or values:
            ratio = page.max(f"{PREFIX}codec_ratio", tier=tier)
            largest = largest_errors_text(keys, values)
            text += f"; LOSSY: compression ratio {ratio:.2f}, largest relative error: {largest}"
            figures |= {
                "ratio": ratio,
                "largest_error": max(keys, values),
                "largest_key_error": keys,
                "largest_value_error": values,
            }
        yield Check(f"tier {tier}", "ok", text, figures)
