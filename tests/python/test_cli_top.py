# SPDX-License-Identifier: Apache-2.0
"""kv-offload top: rates from two scrapes of a page that a small HTTP server serves."""

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from typer.testing import CliRunner

from kv_offload.cli import app
from kv_offload.cli.server import metrics_url
from kv_offload.cli.top_command import compare, view
from kv_offload.exposition import Page

# As in vLLM's /metrics, with one engine more than usual; recorded from a server and shortened.
RECORDED = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 1.0
# TYPE kv_offload_info gauge
kv_offload_info{copier="host",engine="0",eviction_policy="lru",layout="LBHNC",model_name="tiny",\
namespace="3fa2c0ffee12",tiers="fs",version="0.1.0"} 1.0
# TYPE kv_offload_tier_bytes gauge
kv_offload_tier_bytes{engine="0",model_name="tiny",tier="cpu"} 2.68435456e+08
kv_offload_tier_bytes{engine="0",model_name="tiny",tier="fs"} 1.073741824e+09
kv_offload_tier_capacity_bytes{engine="0",model_name="tiny",tier="cpu"} 5.36870912e+08
kv_offload_tier_capacity_bytes{engine="0",model_name="tiny",tier="fs"} 4.294967296e+09
kv_offload_tier_chunks{engine="0",model_name="tiny",tier="cpu"} 128.0
kv_offload_tier_chunks{engine="0",model_name="tiny",tier="fs"} 512.0
# TYPE kv_offload_hit_tokens_total counter
kv_offload_hit_tokens_total{engine="0",model_name="tiny",tier="cpu"} %(cpu)s
kv_offload_hit_tokens_total{engine="1",model_name="tiny",tier="cpu"} 0.0
kv_offload_hit_tokens_total{engine="0",model_name="tiny",tier="fs"} 1000.0
kv_offload_miss_tokens_total{engine="0",model_name="tiny",reason="not_stored"} %(missed)s
kv_offload_miss_tokens_total{engine="0",model_name="tiny",reason="a \\"new\\" reason"} 5.0
kv_offload_read_record_bytes_total{engine="0",model_name="tiny",tier="fs"} %(read)s
kv_offload_read_seconds_bucket{engine="0",le="+Inf",model_name="tiny",tier="fs"} %(reads)s
kv_offload_read_seconds_count{engine="0",model_name="tiny",tier="fs"} %(reads)s
kv_offload_read_seconds_sum{engine="0",model_name="tiny",tier="fs"} %(seconds)s
kv_offload_queue_depth{engine="0",model_name="tiny",op="read",tier="fs"} 3.0
kv_offload_queue_depth{engine="0",model_name="tiny",op="write",tier="fs"} 4.0
kv_offload_oldest_op_seconds{engine="0",model_name="tiny",op="read",tier="fs"} 0.25
kv_offload_oldest_op_seconds{engine="0",model_name="tiny",op="write",tier="fs"} 0.5
kv_offload_failures_total{engine="0",kind="corrupt",model_name="tiny",op="read",tier="fs"} 2.0
kv_offload_decisions_total{choice="load",engine="0",model_name="tiny"} 7.0
kv_offload_decisions_total{choice="recompute",engine="0",model_name="tiny"} 2.0
kv_offload_saved_seconds_total{engine="0",model_name="tiny"} 12.5
"""
FIRST = RECORDED % {"cpu": "4000.0", "missed": "1000.0", "read": "1.0e+06", "reads": "10.0", "seconds": "1.0"}
LATER = RECORDED % {
    "cpu": "4600.0",
    "missed": "1200.0",
    "read": "5.0e+06",
    "reads": "20.0",
    "seconds": "1.05",
}


@pytest.fixture
def serve():
    """Serves the given pages one after another, then repeats the last; returns the address."""
    servers = []

    def begin(*pages):
        left = list(pages)

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                body = (left.pop(0) if len(left) > 1 else left[0]).encode()
                self.send_response(200 if self.path == "/metrics" else 404)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        servers.append((server, thread))
        return f"http://127.0.0.1:{server.server_port}"

    yield begin
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()


def run(*arguments, status=0):
    result = CliRunner().invoke(app, ["top", "--interval", "0.05", *arguments])
    assert result.exit_code == status, f"{result.output}\n{result.exception!r}"
    return result


def test_rates_are_computed_over_an_interval():
    figures = compare(Page(FIRST), Page(LATER), 2.0)
    cpu, fs = figures["tiers"]["cpu"], figures["tiers"]["fs"]
    assert (cpu["hit_tokens"], cpu["hit_tokens_per_second"]) == (4600, 300)
    assert (cpu["bytes"], cpu["capacity_bytes"], cpu["chunks"]) == (256 << 20, 512 << 20, 128)
    assert (fs["read_bytes_per_second"], fs["queue_depth"], fs["oldest_op_seconds"]) == (2.0e6, 7, 0.5)
    assert fs["read_seconds"] == pytest.approx(0.005)
    assert fs["failures"] == 2
    assert figures["neighbours"]["engines"] == 0
    assert figures["misses"] == {
        "not_stored": {"tokens": 1200, "tokens_per_second": 100},
        'a "new" reason': {"tokens": 5, "tokens_per_second": 0},
    }
    assert figures["hit_rate"] == pytest.approx(600 / 800)
    assert figures["hit_rate_since_start"] == pytest.approx(5600 / (5600 + 1205))
    assert figures["decisions"] == {"load": 7, "recompute": 2}


def test_an_idle_interval_has_no_rate():
    figures = compare(Page(FIRST), Page(FIRST), 2.0)
    assert figures["hit_rate"] is None
    assert figures["tiers"]["fs"]["read_seconds"] is None


def test_a_restarted_server_counts_from_zero():
    assert compare(Page(LATER), Page(FIRST), 1.0)["tiers"]["cpu"]["hit_tokens_per_second"] == 4000


def test_top_once_prints_all_figures_as_text(serve):
    text = " ".join(run(serve(FIRST, LATER), "--once").output.split())
    for part in (
        "version 0.1.0 namespace 3fa2c0ffee12 copier host",
        "hit rate 75.0% now, 82.3% since start",
        "cpu 256.0 MiB 512.0 MiB 50.0% 128",
        "fs 1.0 GiB 4.0 GiB 25.0% 512",
        "5.0 ms 7 0.5 s 2",
        "decisions: load 7, recompute 2",
    ):
        assert part in text
    assert text.index("not_stored") < text.index('a "new" reason'), "the worst must be first"


def test_top_once_prints_all_figures_as_json(serve):
    (line,) = run(serve(FIRST, LATER) + "/metrics", "--once", "--json").stdout.splitlines()
    assert json.loads(line)["hit_rate"] == pytest.approx(0.75)


def test_each_interval_is_printed_without_a_terminal(serve):
    assert run(serve(FIRST, LATER), "--count", "3").output.count("hit rate") == 3


def test_a_missing_server_exits_with_1(serve):
    result = run("127.0.0.1:1", "--once", status=1)
    assert result.stderr.startswith("kv-offload: http://127.0.0.1:1/metrics cannot be reached")
    for part in ("Connection refused", "is the server running there", "are host and port right"):
        assert part in result.stderr


@pytest.mark.parametrize(
    "answer", [b"-ERR unknown command\r\n", b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nup"]
)
@pytest.mark.parametrize("command", ["top", "why", "doctor"])
def test_a_server_that_does_not_speak_http_exits_with_1(answer, command):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def reply():
            with listener.accept()[0] as connection:
                connection.recv(1 << 16)
                connection.sendall(answer)

        thread = threading.Thread(target=reply)
        thread.start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        result = CliRunner().invoke(app, [command, address])
        thread.join()
    assert result.exit_code == 1, repr(result.exception)
    assert f"http://{address}/metrics cannot be reached (" in result.stderr


def test_a_port_that_is_not_a_number_exits_with_1():
    assert "cannot be reached (nonnumeric port: '80x')" in run("127.0.0.1:80x", "--once", status=1).stderr


def test_an_infinite_interval_exits_with_2(serve):
    assert run(serve(FIRST), "--interval", "inf", status=2).stderr.startswith("kv-offload: ")


def test_a_missing_page_names_the_address(serve):
    address = serve(FIRST)
    result = run(f"{address}/elsewhere", "--once", status=1)
    assert f"{address}/elsewhere returned 404 Not Found" in result.stderr


def test_a_page_of_another_server_exits_with_1(serve):
    assert "no kv_offload_* metrics" in run(serve("up 1\n"), "--once", status=1).stderr


@pytest.mark.parametrize("given", ["ftp://host/metrics", "http://"])
def test_an_invalid_address_exits_with_2(given):
    assert "is not a server address" in run(given, "--once", status=2).stderr


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("host:8000", "http://host:8000/metrics"),
        ("http://host:8000/", "http://host:8000/metrics"),
        ("https://host/vllm/metrics", "https://host/vllm/metrics"),
    ],
)
def test_addresses_are_completed_to_metrics_urls(given, meant):
    assert metrics_url(given) == meant


def test_values_are_read_by_name_and_label():
    page = Page('# a comment\n\nname{a="x, y",b="}"} 1 1700000000\nname{a="z"} 2\nother +Inf\nnone NaN\n')
    assert page.sum("name") == 3
    assert page.sum("name", b="}") == 1
    assert page.values_of("name", "a") == ["x, y", "z"]
    assert page.max("other") == float("inf")
    assert not page.has("none"), "an unknown value is not a value"


def test_a_page_without_metrics_is_reported(serve):
    address = serve("<html>not a metrics page</html>\n")
    result = run(address, "--once", status=1)
    assert f"{address}/metrics is not a metrics page" in result.stderr
    assert "give the server's address" in result.stderr


TENANTS = """\
kv_offload_tenant_bytes{engine="0",tenant="acme"} 1.048576e+06
kv_offload_tenant_share_bytes{engine="0",tenant="acme"} 4.194304e+06
kv_offload_tenant_share_bytes{engine="0",tenant="other"} 2.097152e+06
kv_offload_tenant_tier_bytes{engine="0",tenant="acme",tier="fs"} 3.145728e+06
kv_offload_tenant_tier_share_bytes{engine="0",tenant="acme",tier="fs"} 8.388608e+06
kv_offload_tenant_hit_tokens_total{engine="0",tenant="acme",tier="cpu"} %(cpu)s
kv_offload_tenant_hit_tokens_total{engine="0",tenant="acme",tier="fs"} 50.0
kv_offload_tenant_miss_tokens_total{engine="0",tenant="acme"} %(missed)s
kv_offload_tenant_read_bytes_total{engine="0",tenant="acme",tier="fs"} %(read)s
"""


def test_each_tenant_has_its_share_and_its_hit_rate():
    before = Page(FIRST + TENANTS % {"cpu": "100.0", "missed": "50.0", "read": "0.0"})
    after = Page(LATER + TENANTS % {"cpu": "400.0", "missed": "150.0", "read": "2.0e+06"})
    figures = compare(before, after, 2.0)["tenants"]
    assert list(figures) == ["acme", "other"]
    acme = figures["acme"]
    assert (acme["bytes"], acme["share_bytes"]) == (1 << 20, 4 << 20)
    assert acme["tiers"] == {"fs": {"bytes": 3 << 20, "share_bytes": 8 << 20}}
    assert acme["hit_rate"] == 0.75
    assert acme["hit_rate_since_start"] == 0.75
    assert acme["hit_tokens_per_second"] == 150
    assert acme["read_bytes_per_second"] == 1e6
    assert figures["other"]["hit_rate"] is None


def test_the_page_lists_tenants_only_if_there_are_any(serve):
    tenants = TENANTS % {"cpu": "1.0", "missed": "1.0", "read": "0.0"}
    shown = CliRunner().invoke(app, ["top", serve(FIRST + tenants, LATER + tenants), "--once", "-i", "0.05"])
    assert "acme" in shown.output
    assert "4.0 MiB" in shown.output
    assert "tenants on tiers" in shown.output
    assert "8.0 MiB" in shown.output
    shown = CliRunner().invoke(app, ["top", serve(FIRST, LATER), "--once", "-i", "0.05"])
    assert "tenant" not in shown.output


def shown(text: str) -> str:
    """Returns the view of this page, which follows FIRST."""
    from rich.console import Console

    console = Console(width=100)
    with console.capture() as capture:
        console.print(view("host", compare(Page(FIRST), Page(text), 10.0)))
    return capture.get()


def test_lost_hosts_are_shown_if_there_are_any() -> None:
    lost = LATER + 'kv_offload_lost_hosts{engine="0",model_name="tiny"} 2.0\n'
    assert "lost hosts: 2; nothing is loaded or stored" in shown(lost)
    none = LATER + 'kv_offload_lost_hosts{engine="0",model_name="tiny"} 0.0\n'
    assert "lost hosts" not in shown(none)


def test_each_host_of_an_engine_has_a_row_with_its_part_of_each_tier() -> None:
    page = LATER
    for host, connected in (("0", 1), ("1", 1), ("2", 0)):
        page += f'kv_offload_host_connected{{engine="0",host="{host}"}} {connected}\n'
    for host, usable, slowest in (("0", 1, 2), ("1", 0, 30)):
        labels = f'engine="0",host="{host}",tier="fs"'
        page += (
            f"kv_offload_host_tier_bytes{{{labels}}} 1048576\n"
            f"kv_offload_host_tier_capacity_bytes{{{labels}}} 4194304\n"
            f'kv_offload_host_tier_usable{{{labels},op="read"}} 1\n'
            f'kv_offload_host_tier_usable{{{labels},op="write"}} {usable}\n'
            f"kv_offload_host_slowest_reads_total{{{labels}}} {slowest}\n"
            f'kv_offload_host_failures_total{{{labels},op="read",kind="io"}} {slowest + 5}\n'
        )
    lines = [line.split() for line in shown(page).splitlines()]
    held = ["fs", "1.0", "MiB", "4.0", "MiB", "-"]
    assert ["0", "connected", *held, "2", "7"] in lines
    assert ["1", "out", "of", "service", *held, "30", "35"] in lines
    assert ["2", "lost", *["-"] * 6] in lines
    assert "hosts" not in shown(LATER)


def test_neighbours_are_shown_if_there_are_any() -> None:
    near = LATER + (
        'kv_offload_neighbours{engine="0",model_name="tiny"} 3.0\n'
        'kv_offload_hit_tokens_total{engine="0",model_name="tiny",tier="neighbour"} 50.0\n'
        'kv_offload_borrowed_chunks{engine="0",model_name="tiny"} 12.0\n'
        'kv_offload_lent_chunks{engine="0",model_name="tiny"} 4.0\n'
    )
    assert "neighbours: 3; 5 hits/s, 12 chunks borrowed, 4 lent" in shown(near)
    assert "neighbours" not in shown(LATER)
    near += (
        'kv_offload_shared_memory_info{engine="0",model_name="tiny",neighbour="1"} 1.0\n'
        'kv_offload_shared_memory_info{engine="1",model_name="tiny",neighbour="3"} 0.0\n'
        'kv_offload_neighbour_hit_tokens_total{engine="0",model_name="tiny",neighbour="0"} 30.0\n'
        'kv_offload_neighbour_hit_tokens_total{engine="0",model_name="tiny",neighbour="2"} 20.0\n'
    )
    assert "neighbours: 3 (this engine is number 1); 5 hits/s (3 from 0, 2 from 2), 12 chunks" in shown(near)
