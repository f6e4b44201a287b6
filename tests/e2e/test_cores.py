# SPDX-License-Identifier: Apache-2.0
"""CPU use of a server's processes while a request waits for records."""

from __future__ import annotations

from pathlib import Path

from answers import make_prompts
from local_server import LocalServer, kv_transfer_config
from setting import Serve

AWAIT_MS = 3000


def times_slept(server: LocalServer) -> int:
    """Returns how often the rank's message thread has yielded its core voluntarily so far."""
    (rank,) = (process for process in server.processes() if "Worker" in process.command)
    status = Path(f"/proc/{rank.pid}/status").read_text()
    return int(status.split("\nvoluntary_ctxt_switches:")[1].split()[0])


def sleeps_while_waiting(start: Serve, model: Path, root: Path, how: str) -> int:
    """Counts sleeps during a prompt of one chunk whose record never arrives, until it is recomputed."""
    config = kv_transfer_config("64MiB", root, wait_while_loading=how)
    with start(model, config) as server:
        warm_up, prompt = make_prompts(2, 1)
        server.ask(warm_up, max_tokens=1)
        before = times_slept(server)
        answer = server.ask(prompt, max_tokens=1, kv_transfer_params={"kv_offload_remote_wait_ms": AWAIT_MS})
        assert answer.seconds >= AWAIT_MS / 1000
        assert answer.cached_tokens == 0
        return times_slept(server) - before


def test_a_rank_does_not_spin_while_a_request_waits_for_records(
    start: Serve, model: Path, tmp_path: Path
) -> None:
    spins, sleeps = (sleeps_while_waiting(start, model, tmp_path / how, how) for how in ("spin", "auto"))
    assert sleeps > 500
    assert sleeps > 10 * spins
