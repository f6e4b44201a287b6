# SPDX-License-Identifier: Apache-2.0
"""kv-offload warm: what it sends to a small HTTP server, and what it makes of the responses."""

import json
import os
import signal
import socket
import struct
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from typer.testing import CliRunner

from kv_offload.cli import app
from kv_offload.cli.warm_command import Totals
from kv_offload.prompt_file import read_prompts
from kv_offload.warming import Sender, Server

KEY = "sk-of-this-test"
USAGE = {"prompt_tokens": 100, "completion_tokens": 1}


def usage(cached=None, report=None):
    """Returns a response's body as vLLM writes it."""
    details = None if cached is None else {"cached_tokens": cached}
    params = None if report is None else {"kv_offload": {"hit_tokens": report}}
    return {"usage": USAGE | {"prompt_tokens_details": details}, "kv_transfer_params": params}


class Fake:
    """A server that answers prompt N with ``replies[N]``, a list of (status, headers, body), one for each
    attempt; the last one is repeated. A body may also be a function that the handler's thread calls."""

    def __init__(self, models):
        self.models, self.replies = models, {}
        self.default = (200, {}, usage())
        self.requests, self.headers = [], []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                fake.headers.append(self.headers)
                data = [{"id": name} for name in fake.models]
                self.reply(200 if self.path == "/v1/models" else 404, {}, {"data": data})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                fake.headers.append(self.headers)
                fake.requests.append((self.path, body))
                left = fake.replies.get(str(body.get("prompt")), [fake.default])
                self.reply(*(left.pop(0) if len(left) > 1 else left[0]))

            def reply(self, status, headers, body):
                if callable(body):
                    body(self)
                    return
                text = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        self.thread = threading.Thread(target=self.http.serve_forever)
        self.thread.start()

    def bodies(self):
        return [body for _, body in self.requests]

    def close(self):
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()


def reset_connection(handler):
    """Ends a connection with RST instead of a response."""
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.rfile.close()
    handler.wfile.close()
    handler.connection.close()
    handler.close_connection = True
    handler.wfile = open(os.devnull, "wb")  # noqa: SIM115  (the base class flushes and closes it)


@pytest.fixture
def server():
    fake = Fake(["tiny"])
    yield fake
    fake.close()


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture
def pauses(monkeypatch):
    """Replaces the waits between retries; returns their seconds."""
    seen = []
    build = Sender.__init__
    monkeypatch.setattr(Sender, "__init__", lambda self, *given: build(self, *given, pause=seen.append))
    return seen


def warm(url, *lines, status=0, options=()):
    given = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    result = CliRunner().invoke(app, ["warm", "-", "--url", url, *options], input=given)
    assert result.exit_code == status, f"{result.output}\n{result.exception!r}"
    return result


def report(url, *lines, status=0, options=()):
    return json.loads(warm(url, *lines, status=status, options=("--json", *options)).stdout)


# ---- what is sent


def test_bodies_are_sent_as_given_with_one_token(server):
    plain = {"prompt": "a", "cache_salt": "s", "kv_transfer_params": {"kv_offload_load_policy": "always"}}
    chat = {"messages": [{"role": "user", "content": "b"}], "tools": [{"type": "function"}]}
    replaced = {"max_tokens": 9, "max_completion_tokens": 9, "min_tokens": 5, "n": 3, "stream": True}
    warm(server.url, plain | replaced, chat | replaced | {"stream_options": {}}, options=["--concurrency", 1])
    one = {"model": "tiny", "max_tokens": 1, "n": 1, "stream": False}
    assert server.requests == [("/v1/completions", plain | one), ("/v1/chat/completions", chat | one)]


def test_lines_of_the_batch_format_are_sent(server):
    ids = {"model": "m", "prompt": [1, 2, 3]}
    chat = {"model": "m", "messages": [{"role": "user", "content": "b"}]}
    batch = [
        {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": ids},
        {"custom_id": "2", "method": "POST", "url": "/v1/chat/completions", "body": chat},
    ]
    warm(server.url, *batch, options=["--concurrency", 1])
    assert [path for path, _ in server.requests] == ["/v1/completions", "/v1/chat/completions"]
    assert [body["model"] for body in server.bodies()] == ["m", "m"], "a line's model must be kept"
    assert server.bodies()[0]["prompt"] == [1, 2, 3]


def test_a_file_is_read_up_to_the_limit(server, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('\ufeff{"prompt": "a"}\n\n{"prompt": "b"}\nnot read\n', encoding="utf-8")
    result = CliRunner().invoke(app, ["warm", str(file), "--url", f"{server.url}/v1/", "-l", "2"])
    assert result.exit_code == 0, result.output
    assert sorted(body["prompt"] for body in server.bodies()) == ["a", "b"]


INVALID = [
    ("no json", '"no json" is not JSON'),
    ('{"prompt": NaN}', "NaN is not a JSON value"),
    ([1], "[1] is not a request body"),
    ({"prompts": "a"}, "has neither prompt nor messages (keys: prompts)"),
    ({"prompt": "a", "messages": [{}]}, "has both prompt and messages"),
    ({"prompt": ""}, 'prompt is ""; possible: one text, or one list of token ids'),
    ({"prompt": ["a", "b"]}, 'prompt is ["a", "b"]'),
    ({"prompt": [1, True]}, "prompt is [1, true]"),
    ({"prompt": [1, -1]}, "prompt is [1, -1]"),
    ({"messages": "a"}, 'messages is "a"; possible: a list such as'),
    ({"messages": []}, "messages is []"),
    ({"prompt": "a", "model": 1}, "model is 1; possible: the name of a model"),
    ({"url": "/v1/embeddings", "body": {}}, 'url is "/v1/embeddings"; possible: /v1/completions, /v1/chat'),
    ({"url": "/v1/completions", "method": "GET", "body": {}}, 'method is "GET"; possible: POST'),
    ({"url": "/v1/completions", "body": 1}, "body is 1; possible:"),
    (
        {"url": "/v1/chat/completions", "body": {"prompt": "a"}},
        "url is /v1/chat/completions, and body has prompt; possible for prompt: /v1/completions",
    ),
]


@pytest.mark.parametrize(("line", "said"), INVALID)
def test_an_invalid_line_is_reported_and_nothing_is_sent(server, line, said):
    text = warm(server.url, {"prompt": "a"}, "", line, status=2).stderr
    assert text.startswith(
        "kv-offload: 1 line is invalid, and nothing was sent:\n  - standard input, line 3: "
    )
    assert said.replace('"no json"', "no json") in text
    assert server.headers == []


def test_all_invalid_lines_are_counted():
    with pytest.raises(ValueError, match=r"^30 lines are invalid") as error:
        read_prompts([b"[]"] * 30, "f.jsonl")
    lines = str(error.value).splitlines()
    assert "f.jsonl, line 20: [] is not" in lines[20]
    assert lines[21:] == ["  - 10 more"]


def test_bytes_that_are_not_utf_8_are_reported():
    with pytest.raises(ValueError, match=r"f, line 1: is not UTF-8 \(byte 12\)"):
        read_prompts([b'{"prompt": "\xff"}'], "f")


def test_deeply_nested_json_is_reported():
    with pytest.raises(ValueError, match="f, line 1: "):
        read_prompts([b"[" * 1_000_000], "f")


def test_a_missing_or_empty_file_exits_with_2(server, tmp_path):
    result = CliRunner().invoke(app, ["warm", str(tmp_path / "none"), "--url", server.url])
    assert (result.exit_code, "No such file" in result.stderr) == (2, True)
    assert "standard input has no prompts" in warm(server.url, "", status=2).stderr


def test_a_model_must_be_chosen_if_there_are_several(server):
    server.models = ["tiny", "adapter"]
    text = warm(server.url, {"prompt": "a"}, status=2).stderr
    assert "serves 2 models (tiny, adapter); choose one with --model" in text
    warm(server.url, {"prompt": "a"}, options=["--model", "adapter"])
    assert [body["model"] for body in server.bodies()] == ["adapter"]


# ---- the key


def test_the_key_is_sent_and_never_printed(server, monkeypatch):
    monkeypatch.setenv("VLLM_KEY", KEY)
    server.default = (401, {}, {"error": {"message": f"wrong key {KEY}"}})
    result = warm(server.url, {"prompt": "a"}, status=1, options=["--api-key-env", "VLLM_KEY"])
    assert [headers["Authorization"] for headers in server.headers] == [f"Bearer {KEY}"] * 2
    assert "401 Unauthorized: wrong key ***" in result.output
    assert KEY not in result.output


@pytest.mark.parametrize("value", [None, f"{KEY}\n{KEY}", f"{KEY}\u00e9"])
def test_a_missing_or_unusable_key_exits_with_2(server, monkeypatch, value):
    if value is not None:
        monkeypatch.setenv("VLLM_KEY", value)
    result = warm(server.url, {"prompt": "a"}, status=2, options=["--api-key-env", "VLLM_KEY"])
    assert "VLLM_KEY" in result.stderr
    assert KEY not in result.output
    assert server.headers == []


def test_a_redirect_is_not_followed_with_the_key(server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    other = Fake(["tiny"])
    server.default = (307, {"Location": f"{other.url}/v1/completions"}, {})
    found = report(server.url, {"prompt": "a"}, status=1)
    other.close()
    assert "307 Temporary Redirect" in found["failures"][0]["message"]
    assert other.headers == []


# ---- what is reported


def test_tokens_are_summed(server):
    server.replies = {
        "a": [(200, {}, usage(64, {"fs": 48, "cpu": 16}))],
        "b": [(200, {}, usage(32, {"fs": 32}))],
        "c": [(200, {}, usage(0, {}))],
    }
    lines = [{"prompt": prompt} for prompt in "abc"]
    found = report(server.url, *lines)
    assert (found["prompts"], found["processed"], found["failed"]) == (3, 3, 0)
    assert (found["prompt_tokens"], found["cached_tokens"]) == (300, 96)
    assert found["hit_tokens"] == {"fs": 80, "cpu": 16}
    assert found["tokens_per_second"] == pytest.approx(300 / found["seconds"])
    text = warm(server.url, *lines).stdout
    assert "3 of 3 prompts processed: 300 tokens in " in text
    assert "cached tokens: 96 (32.0%)" in text
    assert "hit tokens by tier: cpu 16, fs 80" in text


def test_missing_cached_tokens_are_not_reported_as_zero(server):
    found = report(server.url, {"prompt": "a"})
    assert (found["cached_tokens"], found["hit_tokens"]) == (None, None)
    text = warm(server.url, {"prompt": "a"}).stdout
    assert "does not report them; vLLM does with --enable-prompt-tokens-details" in text


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (400, {"error": {"message": "prompt is too long"}}, "400 Bad Request: prompt is too long"),
        (400, {"object": "error", "message": "too long"}, "400 Bad Request: too long"),
        (422, {"detail": "no such field"}, ": no such field"),
        (500, b"\x1b[2Joops", "500 Internal Server Error: \\x1b[2Joops"),
        (502, b"", "502 Bad Gateway: no message"),
        (200, b"<html>", "the response is not a JSON object"),
        (200, {"usage": None}, "the response has no usage.prompt_tokens"),
    ],
)
def test_a_failed_prompt_is_reported_with_its_line_and_the_servers_message(server, status, body, said):
    server.replies = {"b": [(status, {}, body)]}
    found = report(server.url, {"prompt": "a"}, "", {"prompt": "b"}, status=1)
    ((failed,), done) = found["failures"], found["processed"]
    assert (failed["line"], done) == (3, 1)
    assert failed["message"].endswith(said) or failed["message"].startswith(said)
    assert len(server.requests) == 2, "such a failure must not be retried"


def test_only_the_first_failures_are_shown(server):
    server.default = (400, {}, {"message": "no"})
    text = warm(server.url, *[{"prompt": "a"}] * 8, status=1).stdout
    assert "8 failed:" in text
    assert [line for line in range(1, 9) if f"  line {line}: 400" in text] == [1, 2, 3, 4, 5]
    assert "  and 3 more" in text


# ---- retries


def test_requests_to_a_busy_server_are_repeated_after_longer_pauses(server, pauses):
    busy = (503, {}, {"message": "loading"})
    server.replies = {"a": [busy, (429, {}, {}), busy, (200, {}, usage())]}
    assert report(server.url, {"prompt": "a"})["processed"] == 1
    assert pauses == [0.5, 1.0, 2.0]


def test_a_server_that_stays_busy_fails_the_prompt(server, pauses):
    server.default = (503, {}, {"message": "loading"})
    (failed,) = report(server.url, {"prompt": "a"}, status=1)["failures"]
    assert failed["message"] == "503 Service Unavailable: loading (sent 5 times)"
    assert len(server.requests) == 5
    assert pauses == [0.5, 1.0, 2.0, 4.0]


def test_retry_after_is_honoured(server, pauses):
    server.replies = {"a": [(429, {"Retry-After": "7"}, {}), (200, {}, usage())]}
    assert report(server.url, {"prompt": "a"})["processed"] == 1
    assert pauses == [7.0]


def test_a_date_in_retry_after_is_honoured(server):
    seen = []
    date = "Wed, 21 Oct 2015 07:28:00 GMT"
    server.replies = {"a": [(503, {"Retry-After": date}, {}), (200, {}, usage())]}
    address = Server(server.url, now=lambda: 1445412480 - 42.0)
    (prompt,) = read_prompts([b'{"prompt": "a"}'], "f")
    (outcome,) = Sender(address, [prompt], "tiny", 1, pause=seen.append).outcomes()
    assert (outcome.error, seen) == ("", [42.0])


def test_an_hour_of_retry_after_fails_the_prompt(server, pauses):
    server.default = (429, {"Retry-After": "3600"}, {"message": "quota"})
    (failed,) = report(server.url, {"prompt": "a"}, status=1)["failures"]
    assert failed["message"].endswith("quota (the server asks to wait 3,600 s)")
    assert pauses == []


def test_a_reset_connection_is_retried(server, pauses):
    server.replies = {"a": [(0, {}, reset_connection), (200, {}, usage())]}
    assert report(server.url, {"prompt": "a"})["processed"] == 1
    assert (len(server.requests), pauses) == (2, [0.5])


# ---- unreachable, stopped


def test_an_unreachable_server_exits_with_1():
    for line in ({"prompt": "a"}, {"prompt": "a", "model": "m"}):
        result = warm("127.0.0.1:1", line, status=1)
        assert "kv-offload: http://127.0.0.1:1 cannot be reached (Connection refused)" in result.stderr


def test_a_server_that_becomes_unreachable_ends_the_run(server, pauses):
    def leave(handler):
        server.http.socket.close()  # connections are refused from now on
        reset_connection(handler)

    server.replies = {"b": [(0, {}, leave)]}
    lines = [{"prompt": prompt} for prompt in "abcd"]
    result = warm(server.url, *lines, status=1, options=["--concurrency", 1])
    assert "1 of 4 prompts processed" in result.stdout
    assert "3 not processed: the server became unreachable" in result.stdout
    assert "cannot be reached" in result.stderr
    assert len(server.requests) == 2


def test_ctrl_c_ends_with_a_report(server):
    """The second request is never answered: only its aborted connection ends it."""
    ended = threading.Event()

    def interrupt(handler):
        os.kill(os.getpid(), signal.SIGINT)
        handler.connection.recv(1)  # returns when the client closes the connection
        ended.set()
        handler.close_connection = True

    server.replies = {"b": [(0, {}, interrupt)]}
    lines = [{"prompt": prompt} for prompt in "abcd"]
    found = report(server.url, *lines, status=1, options=["--concurrency", 1])
    assert (found["interrupted"], found["processed"], found["not_processed"]) == (True, 1, 3)
    assert found["failures"] == []
    assert ended.wait(60)
    assert [body["prompt"] for body in server.bodies()] == ["a", "b"]


def test_a_response_that_arrives_with_ctrl_c_is_counted(server, monkeypatch):
    counted = Totals.add

    def add(totals, outcome):
        os.kill(os.getpid(), signal.SIGINT)
        counted(totals, outcome)

    monkeypatch.setattr(Totals, "add", add)
    found = report(server.url, {"prompt": "a"})
    assert (found["interrupted"], found["processed"], found["not_processed"]) == (True, 1, 0)


def test_a_late_response_fails_the_prompt(server):
    server.replies = {"a": [(0, {}, lambda handler: handler.connection.recv(1))]}
    line = {"prompt": "a", "model": "m"}  # no other request, which the timeout could end
    (failed,) = report(server.url, line, status=1, options=["--timeout", "0.1"])["failures"]
    assert failed["message"] == "no response within 0.1 s; raise --timeout"


def test_requests_run_concurrently(server):
    together = threading.Barrier(3)

    def meet(handler):
        together.wait(60)
        handler.reply(200, {}, usage())

    server.default = (0, {}, meet)
    assert report(server.url, *[{"prompt": "a"}] * 3, options=["--concurrency", 3])["processed"] == 3


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("ftp://host", "ftp://host is not a server address"),
        ("http://", "is not a server address"),
        ("http://user:secret@host", "contains a user or password"),
        ("http://host/?key=1", "is not a server address"),
    ],
)
def test_an_invalid_address_exits_with_2(url, said):
    result = warm(url, {"prompt": "a"}, status=2)
    assert said in result.stderr
    assert "secret" not in result.output


def test_a_timeout_must_be_a_number():
    with pytest.raises(ValueError, match="--timeout is nan"):
        Server("127.0.0.1:1", timeout=float("nan"))
