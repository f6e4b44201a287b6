"""Run by test_contract.py: the one warning when nothing is ever hit."""

import adapter
import pytest

adapter.use_specs()

from kv_offload.specs.watch import HitWatch  # noqa: E402

from kv_offload import _core  # noqa: E402


def _watched(*misses: tuple[str, float], hits: float = 0, chunks: float = 10) -> tuple[HitWatch, object]:
    metrics = _core.Metrics()
    metrics.set("kv_offload_tier_chunks", ("cpu",), chunks)
    for reason, tokens in misses:
        metrics.add("kv_offload_miss_tokens_total", (reason,), tokens)
    if hits:
        metrics.add("kv_offload_hit_tokens_total", ("fs",), hits)
    return HitWatch(metrics, ("cpu", "fs")), metrics


def test_it_warns_once_and_names_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    watch, _ = _watched(("not_stored", 50_000), ("deadline", 200_000))
    for now in (0.0, 100.0, 200.0):
        watch.look(now)
    (record,) = caplog.records
    assert "none was ever hit" in record.getMessage()
    assert "(deadline): reads take longer than lookup_deadline_ms" in record.getMessage()


@pytest.mark.parametrize(
    ("misses", "hits", "chunks"),
    [
        ([("deadline", 200_000)], 16, 10),  # something was hit
        ([("not_stored", 200_000)], 0, 10),  # prompts that nobody asked before
        ([("deadline", 200_000)], 0, 0),  # nothing is stored
    ],
)
def test_it_is_silent_where_nothing_is_strange(
    misses: list[tuple[str, float]], hits: float, chunks: float, caplog: pytest.LogCaptureFixture
) -> None:
    watch, _ = _watched(*misses, hits=hits, chunks=chunks)
    watch.look(0.0)
    watch.look(100.0)
    assert not caplog.records
