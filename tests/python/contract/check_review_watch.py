# SPDX-License-Identifier: Apache-2.0
"""review_a: a lost connection must not use up the only warning."""

import adapter
import pytest

adapter.use_specs()

from check_watch import Tiers  # noqa: E402

from kv_offload.specs.watch import RemovalsWatch  # noqa: E402


def test_a_refusal_is_logged_although_the_server_was_down_before(caplog: pytest.LogCaptureFixture) -> None:
    tiers = Tiers(False)
    watch = RemovalsWatch(tiers, ("far",))  # type: ignore[arg-type]
    tiers.removals_problem = ["redis://x:6379/0: cannot connect: Connection refused"]
    watch.poll()
    tiers.removals_problem = [""]
    watch.poll()
    tiers.removals_problem = ["the server refused CLIENT TRACKING: why"]
    watch.poll()
    assert any("CLIENT TRACKING" in record.getMessage() for record in caplog.records)
