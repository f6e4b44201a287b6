# SPDX-License-Identifier: Apache-2.0
"""Tables in a terminal of 80 columns: one line per row, and no header broken inside a word."""

import json

import fake_core
import pytest
from test_cli import core, vllm  # noqa: F401  (fixtures)
from test_cli_top import FIRST, LATER, serve  # noqa: F401
from typer.testing import CliRunner
from written_root import FACTS, KEYS, write_root

from kv_offload.cli import app

HEADERS = {
    "stat": ("namespace", "bytes", "records", "oldest", "newest", "in use", "model"),
    "ls": ("key", "bytes", "used", "written", "hit", "namespace", "epoch"),
    "verify": ("record", "kind", "what", "removed"),
}
LLAMA_8B = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}


def lines(*arguments, width=80, statuses=(0, 1)):
    result = CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": str(width)})
    assert result.exit_code in statuses, result.output
    found = result.stdout.splitlines()
    assert max(map(len, found)) <= width
    return found


@pytest.mark.parametrize("command", HEADERS)
def test_headers_are_whole_words_on_one_line(core, command):  # noqa: F811
    headers = [" ".join(line.split()) for line in lines(command, "/root")]
    assert " ".join(HEADERS[command]) in headers


def test_a_long_name_folds_and_breaks_no_other_column(core):  # noqa: F811
    long = json.dumps(
        {"model": {"name": "some-organisation/" + "a-model-of-a-long-name-" * 4, "revision": "c0ffee"}}
    )
    core.setattr(fake_core, "NAMESPACE", long)
    found = [" ".join(line.split()) for line in lines("stat", "/root")]
    assert " ".join(HEADERS["stat"]) in found
    assert any(line.startswith("abababababab 2.0 MiB 2 ") for line in found)


def test_damage_with_a_long_path_folds_and_breaks_no_other_column(core):  # noqa: F811
    damaged = {"path": "/r/" + "0" * 150, "kind": "corrupt", "message": "payload checksum 1, expected 2 " * 3}
    core.setattr(fake_core.FsRoot, "damaged", (damaged,))
    found = lines("verify", "/root")
    header = next(line for line in found if "kind" in line)
    assert header.split() == list(HEADERS["verify"])
    row = next(line for line in found if line.startswith("/r/"))
    assert " corrupt " in row
    assert row.split()[-1] == "no"


def test_ls_uses_one_line_per_record(tmp_path):
    root = write_root(tmp_path / "root")
    header, *rows = lines("ls", root)
    assert header.split()[0] == "key"
    assert len(rows) == len(KEYS)
    namespace = FACTS.namespace_id().hex()[:12]
    assert all(row.split()[-3:] == ["no", namespace, "1"] for row in rows), "a cell is cut"
    starts = {row.split()[0].rstrip("…") for row in rows}
    assert len(starts) == len(KEYS), "shortened keys must still be distinct"
    assert all(any(key.hex().startswith(start) for key in KEYS) for start in starts)


def test_ls_shows_whole_keys_where_there_is_room(tmp_path):
    root = write_root(tmp_path / "root")
    assert {row.split()[0] for row in lines("ls", root, width=160)[1:]} == {key.hex() for key in KEYS}


def test_top_fits_80_columns(serve):  # noqa: F811
    found = lines("top", serve(FIRST, LATER), "--once", "--interval", "0.05")
    joined = [" ".join(line.split()) for line in found]
    assert "tier held of full chunks" in joined
    assert "tier hits/s read write latency queue oldest failed" in joined


def test_the_other_commands_fit_80_columns(core, vllm, tmp_path):  # noqa: F811
    core.setattr(fake_core, "cuda_unavailable_reason", lambda: "no CUDA driver " * 12)
    root = tmp_path / ("long" * 30)
    assert lines("doctor", "--no-measure", "--root", root)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA_8B))
    shown = [" ".join(line.split()) for line in lines("size", config, "--cpu", "32GiB")]
    assert "kind layers bfloat16 fp8" in shown
