# SPDX-License-Identifier: Apache-2.0
"""A proxy in front of a prefill server and a decode server, with the two calls of vLLM's own proxies.

vLLM ships its proxies as examples and tests, outside its wheel. This one makes the same calls with the same
fields as vLLM 0.32:

    DEMO   examples/disaggregated/disaggregated_serving/disagg_proxy_demo.py
    NIXL   tests/v1/kv_connector/nixl_integration/toy_proxy_server.py
    P2P    tests/v1/kv_offload/tiering/p2p/p2p_connector_proxy.py, for vLLM's tiering between servers

It omits their other features: several servers of a kind, chats, streamed answers, API keys, and
``min_tokens``, which the last two remove from the first call.
"""

from __future__ import annotations

import json
import threading
import urllib.request
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from local_server import LocalServer

Body = dict[str, Any]


@dataclass(frozen=True)
class Protocol:
    """The fields added to the first call (from the request id) and the second (from the first answer)."""

    name: str
    prefill: Callable[[str], Body]
    decode: Callable[[str, Body], Body]
    has_id: bool = True  # both calls carry one request id


def _nixl(_: str) -> Body:
    remote = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
    return {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False, **remote}}


def _given_back(_: str, answer: Body) -> Body:
    given = answer.get("kv_transfer_params")
    return {"kv_transfer_params": given} if given else {}


def _peer(request_id: str, _: Body) -> Body:
    peer = {"kv_request_id": request_id, "remote_host": "127.0.0.1", "remote_port": 5710}
    return {"kv_transfer_params": {"remote_prefiller": peer}}


DEMO = Protocol("demo", lambda _: {}, lambda *_: {}, has_id=False)
NIXL = Protocol("nixl", _nixl, _given_back)
# A custom proxy, in front of servers that both prefill and decode.
AWAITING = Protocol(
    "awaiting", lambda _: {}, lambda *_: {"kv_transfer_params": {"kv_offload_remote_wait_ms": 60_000}}
)
P2P = Protocol("p2p", lambda name: {"kv_transfer_params": {"remote_decoder": {"kv_request_id": name}}}, _peer)


class Proxy:
    """Listens on loopback while the block runs.

    ``between`` is called after the first call was answered and before the second. ``calls`` holds the bodies
    of both, in order.
    """

    def __init__(
        self,
        prefill: LocalServer,
        decode: LocalServer,
        protocol: Protocol,
        between: Callable[[], None] = lambda: None,
    ) -> None:
        self.prefill, self.decode, self.protocol, self.between = prefill, decode, protocol, between
        self.calls: list[Body] = []
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                try:
                    status, answer = 200, proxy.handle(self.path, body)
                except Exception as error:  # the client receives the error
                    status, answer = 502, repr(error).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)

    def handle(self, path: str, body: Body) -> bytes:
        """Returns the answer of the decode server."""
        request_id = str(uuid.uuid4())
        first = {**body, "max_tokens": 1, "stream": False, **self.protocol.prefill(request_id)}
        prefilled = json.loads(self._call(self.prefill, path, first, request_id))
        self.between()
        second = {**body, **self.protocol.decode(request_id, prefilled)}
        return self._call(self.decode, path, second, request_id)

    def _call(self, server: LocalServer, path: str, body: Body, request_id: str) -> bytes:
        self.calls.append(body)
        headers = {"Content-Type": "application/json"}
        headers |= {"X-Request-Id": request_id} if self.protocol.has_id else {}
        request = urllib.request.Request(
            f"http://127.0.0.1:{server.port}{path}", data=json.dumps(body).encode(), headers=headers
        )
        with urllib.request.urlopen(request, timeout=300) as reply:
            return bytes(reply.read())

    def __enter__(self) -> LocalServer:
        """Returns a server that takes requests; its log is the log of the decode server."""
        self._thread.start()
        return replace(self.decode, port=self._server.server_port)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
