# SPDX-License-Identifier: Apache-2.0
"""Text from outside is escaped on a terminal: metric labels, namespace.json, names, server replies."""

import io
import json
import socket
import sys
import threading
import urllib.request
from contextlib import closing, suppress

import fake_core
import pytest
from test_cli_top import FIRST, serve  # noqa: F401  (a fixture)
from typer.testing import CliRunner

import kv_offload
from kv_offload import exposition
from kv_offload.cli import app
from kv_offload.cli.terminal import add_row, console, escape, table
from kv_offload.exposition import Page
from kv_offload.printable import printable

# Clears the screen, sets the title, rings, moves the cursor up, reverses the text, hides it, starts a new
# row.
EVIL = "\x1b[2J\x1b]0;title\x07\x08\x9b1A\u202e\u200b\nall is well"
NOT_PRINTED = {*EVIL} - {*map(chr, range(32, 127))} - {"\n"}


def run(*arguments, status=0):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == status, f"{result.output}\n{result.exception!r}"
    return result.output


def is_plain(text):
    assert not NOT_PRINTED & {*text}, repr(text)
    assert "\\x1b[2J" in text, "the text must be shown escaped"
    assert not any(line.startswith("all is well") for line in text.splitlines())


def test_printable_text_is_unchanged():
    for text in ("plain", "grüße 漢字", "…│ ─", "\\x1b"):
        assert printable(text) == text
    assert printable("a\tb\nc") == "a\\tb\\nc"
    assert printable("a\nb\x00", keep="\n") == "a\nb\\x00"
    assert printable("\udcff") == "\\udcff", "half a character, as in a file name"


PAGE = FIRST
for known in ('reason="not_stored"', 'namespace="3fa2c0ffee12"', 'tier="fs"'):
    PAGE = PAGE.replace(known, f'{known.partition("=")[0]}="EVIL"')


def evil_page():
    label = EVIL.replace("\n", "\\n")
    return PAGE.replace("EVIL", label)


@pytest.mark.parametrize("command", ["top", "why", "doctor"])
def test_labels_of_metrics_are_escaped(command, serve):  # noqa: F811
    options = ["--once", "--interval", "0.05"] if command == "top" else []
    is_plain(run(command, serve(evil_page()), *options))


def test_why_escapes_a_saved_page_and_a_log(tmp_path):
    page, log = tmp_path / "page", tmp_path / "log"
    page.write_text(evil_page())
    is_plain(run("why", page))
    log.write_text(f"kv-offload 1: kv_transfer_params: {EVIL.replace(chr(10), '')} is ignored\n")
    is_plain(run("why", log, status=1))


@pytest.fixture
def core(monkeypatch):
    monkeypatch.setitem(sys.modules, "kv_offload._core", fake_core)
    monkeypatch.setattr(kv_offload, "_core", fake_core, raising=False)
    monkeypatch.setattr("kv_offload.tiers.fs.root.damaged_descriptions", lambda *_: [])
    return monkeypatch


def test_stat_escapes_a_foreign_namespace_json(core):
    stat = fake_core.FsRoot.stat
    described = json.dumps({"model": {"name": EVIL, "revision": EVIL}, "kv_dtype": EVIL})

    def of_others(self):
        report = stat(self)
        for space in report["namespaces"]:
            space["json"] = described
        return report

    core.setattr(fake_core.FsRoot, "stat", of_others)
    is_plain(run("stat", "/root"))
    (space, *_) = json.loads(run("stat", "/root", "--json"))["namespaces"]
    assert space["description"]["kv_dtype"] == EVIL, "JSON has its own escapes"


def test_verify_escapes_the_name_of_a_record(core):
    bad = {"path": f"/r/{EVIL}", "kind": "io", "message": EVIL, "removed": False}
    core.setattr(fake_core.FsRoot, "damaged", (bad,))
    is_plain(run("verify", "/root", status=1))


def test_an_error_that_quotes_a_server_is_escaped(core):
    def fails(self):
        raise RuntimeError(EVIL.replace("\n", ""))

    core.setattr(fake_core.FsRoot, "stat", fails)
    is_plain(run("stat", "/root", status=1))


def test_all_output_of_a_command_is_escaped(monkeypatch):
    """Also covers later commands that do not escape their output themselves."""
    from rich.padding import Padding
    from rich.text import Text

    one_line = EVIL.replace("\n", "")
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    to = console()
    rows = table(one_line, one_line)
    add_row(rows, EVIL)
    rows.add_row(escape(one_line), style="bold")
    for what in (one_line, Text(one_line), Padding(Text(one_line, style="red"), 1), rows):
        to.print(what, markup=False)
    is_plain(out.getvalue())


# ---- how much is read


def test_reading_an_endless_page_stops_at_a_bound(monkeypatch):
    monkeypatch.setattr(exposition, "MOST_PAGE_BYTES", 1 << 20)
    sent = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            with closing(listener.accept()[0]) as connection:
                connection.recv(1 << 16)
                connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                with suppress(OSError):  # the reader has closed the connection
                    while sum(sent) < 1 << 30:
                        sent.append(connection.send(b"x" * (1 << 16)))

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(OSError, match="longer than 1 MiB"):
            exposition.fetch(f"http://127.0.0.1:{listener.getsockname()[1]}/metrics")
        thread.join()
    assert sum(sent) < 1 << 29


class Slow(io.BytesIO):
    """A reply that arrives byte by byte, each byte within the timeout."""

    length = None

    def read1(self, size=-1):
        return super().read(1)


def test_reading_a_page_byte_by_byte_stops_in_time(monkeypatch):
    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: Slow(b"x" * 1000))
    seconds = iter(range(1000))
    with pytest.raises(OSError, match="takes longer than 60 s"):
        exposition.fetch("http://h/metrics", clock=lambda: float(next(seconds)))


def test_labels_are_distinguished_and_found_when_escaped():
    page = Page('m_total{tier="a\\nb"} 1\nm_total{tier="c"} 2\n')
    assert page.values_of("m_total", "tier") == ["a\\nb", "c"]
    assert page.sum("m_total", tier="a\\nb") == 1
