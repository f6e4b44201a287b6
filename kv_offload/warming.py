# SPDX-License-Identifier: Apache-2.0
"""Sends prompts to an OpenAI-compatible server, several at a time, with retries.

Threads: each sender thread takes the next prompt, sends it and puts its outcome into a queue. One thread
reads the outcomes; only it calls ``stop``, which closes the connections of requests in progress. Redirects
are not followed and proxies of the environment not used, so the API key reaches only the given server.
"""

import http.client
import json
import math
import queue
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

from kv_offload.printable import printable
from kv_offload.prompt_file import Prompt

MOST_RETRIES = 4
FIRST_BACKOFF_SECONDS = 0.5
MOST_RETRY_AFTER_SECONDS = 300.0
_CONNECT_SECONDS = 10.0
_MOST_REPLY_BYTES = 16 << 20
_MOST_SHOWN = 300  # characters of a server's message
_BUSY = (429, 503)
_RESETS = (ConnectionResetError, ConnectionAbortedError, BrokenPipeError, http.client.IncompleteRead)


class UnreachableError(OSError):
    """No connection can be made: sending other prompts is useless."""


class RequestError(Exception):
    """The server refused a prompt, or its response is unusable."""


class _RetryableError(RequestError):
    """``after``: seconds that the server asked for."""

    def __init__(self, text: str, after: float = 0.0) -> None:
        super().__init__(text)
        self.after = after


class Connections:
    """The open connections of several threads, which one call closes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[http.client.HTTPConnection] = set()
        self._closed = False

    @contextmanager
    def hold(self, connection: http.client.HTTPConnection) -> Iterator[None]:
        """Holds an established connection. Raises RequestError after ``close_all``."""
        with self._lock:
            if self._closed:
                raise RequestError("stopped")
            self._open.add(connection)
        try:
            yield
        finally:
            with self._lock:
                self._open.discard(connection)

    def close_all(self) -> None:
        """Ends all requests in progress, and prevents further ones."""
        with self._lock:
            self._closed = True
            for connection in self._open:
                sock = connection.sock
                if sock is not None:  # else the response has arrived
                    with suppress(OSError):
                        sock.shutdown(socket.SHUT_RDWR)


@dataclass(frozen=True)
class Outcome:
    """The result for one prompt.

    error: empty if it was processed.
    cached_tokens, hit_tokens: None if the server does not report them.
    """

    line: int
    error: str = ""
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    hit_tokens: dict[str, int] | None = None


@dataclass
class Server:
    """An OpenAI-compatible server. Raises ValueError for an address that is not one.

    timeout: seconds to wait for a response.
    now: the wall clock, for dates in Retry-After.
    """

    given: str
    api_key: str = field(default="", repr=False)
    timeout: float = 600.0
    now: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        if not math.isfinite(self.timeout):
            raise ValueError(f"--timeout is {self.timeout}; give a number of seconds")
        parts = urlsplit(self.given if "://" in self.given else f"http://{self.given}")
        if "@" in parts.netloc:
            raise ValueError("the server's address contains a user or password; use --api-key-env instead")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"{self.given} is not a server address; give one such as http://127.0.0.1:8000")
        self._secure, self._host, self._port = parts.scheme == "https", parts.hostname, parts.port
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self.url = f"{parts.scheme}://{parts.netloc}{self._path}"

    def models(self) -> list[str]:
        """Returns the names of the models. Raises OSError."""
        try:
            reply = self.request("GET", "/v1/models", None, Connections())
            return [str(model["id"]) for model in reply["data"]]
        except (RequestError, LookupError, TypeError) as error:
            what = str(error) if isinstance(error, RequestError) else "the reply has no list of models"
            raise OSError(f"{self.url}/v1/models: {what}; give --model, or check the address") from error

    def request(self, method: str, path: str, body: Any, connections: Connections) -> dict[str, Any]:
        """Returns the JSON object of a reply. ``connections`` holds the connection meanwhile.

        Raises RequestError, and UnreachableError without a connection.
        """
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=min(_CONNECT_SECONDS, self.timeout))
        try:
            self._connect(connection)
            with connections.hold(connection):
                return self._exchange(connection, method, path, body)
        finally:
            connection.close()

    def _connect(self, connection: http.client.HTTPConnection) -> None:
        try:
            connection.connect()
        except _RESETS as error:
            raise _RetryableError(f"connection reset ({_text(error)})") from error
        except (OSError, UnicodeError) as error:
            raise UnreachableError(
                f"{self.url} cannot be reached ({_text(error)}): is the server running there, and are host "
                "and port right? vLLM opens its port only when it has loaded the model"
            ) from error
        connection.sock.settimeout(self.timeout)

    def _exchange(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: Any
    ) -> dict[str, Any]:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        try:
            connection.request(method, self._path + path, None if body is None else json.dumps(body), headers)
            reply = connection.getresponse()
            content = reply.read(_MOST_REPLY_BYTES)
        except TimeoutError as error:
            raise RequestError(f"no response within {self.timeout:g} s; raise --timeout") from error
        except _RESETS as error:
            raise _RetryableError(f"connection reset ({_text(error)})") from error
        except (OSError, http.client.HTTPException) as error:
            raise RequestError(f"not an HTTP response ({_text(error)})") from error
        if reply.status != 200:
            text = self._plain(f"{reply.status} {reply.reason}: {_message(content)}")
            if reply.status in _BUSY:
                raise _RetryableError(text, self._retry_after(reply.getheader("Retry-After")))
            raise RequestError(text)
        try:
            parsed = json.loads(content)
        except (ValueError, RecursionError):
            parsed = None
        if not isinstance(parsed, dict):
            raise RequestError("the response is not a JSON object: is this an OpenAI-compatible server?")
        return parsed

    def _plain(self, text: str) -> str:
        """Shortens a server's text, and removes the API key, which some servers repeat."""
        if self.api_key:
            text = text.replace(self.api_key, "***")
        return printable(text[:_MOST_SHOWN])

    def _retry_after(self, header: str | None) -> float:
        """Returns the seconds of a Retry-After header: a number, or a date; 0 if there is none."""
        if header is None:
            return 0.0
        if header.strip().isdecimal():
            return float(header)
        try:
            return max(0.0, parsedate_to_datetime(header).timestamp() - self.now())
        except (ValueError, OverflowError):
            return 0.0


class Sender:
    """Sends prompts with ``concurrency`` threads. ``pause`` replaces the waits between retries in tests."""

    def __init__(
        self,
        server: Server,
        prompts: Sequence[Prompt],
        model: str,
        concurrency: int,
        pause: Callable[[float], Any] | None = None,
    ) -> None:
        self.unreachable: UnreachableError | None = None
        self._server, self._model = server, model
        self._stopped = threading.Event()
        self._pause = pause or self._stopped.wait
        self._connections = Connections()
        self._lock = threading.Lock()
        self._left = iter(prompts)
        # None: a thread has ended; True: ``interrupt`` was called.
        self._outcomes: queue.SimpleQueue[Outcome | bool | None] = queue.SimpleQueue()
        # Daemons: a thread that is connecting to a dead host does not delay the exit.
        self._threads = [
            threading.Thread(target=self._send_all, daemon=True)
            for _ in range(min(concurrency, len(prompts)))
        ]

    def outcomes(self) -> Iterator[Outcome]:
        """Starts to send; yields each outcome until every prompt was sent, the server is unreachable or
        ``interrupt`` is called."""
        for thread in self._threads:
            thread.start()
        running = len(self._threads)
        while running:
            outcome = self._outcomes.get()
            if outcome is None:
                running -= 1
            elif isinstance(outcome, Outcome):
                yield outcome
            else:
                return

    def interrupt(self) -> None:
        """Makes ``outcomes`` stop after the outcomes already queued. Safe in a signal handler."""
        self._outcomes.put(True)  # takes no lock: SimpleQueue allows this while the same thread reads

    def stop(self) -> list[Outcome]:
        """Aborts the requests in progress; returns the outcomes that were not read."""
        self._stopped.set()
        self._connections.close_all()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(timeout=_CONNECT_SECONDS)
        unread = []
        while not self._outcomes.empty():
            outcome = self._outcomes.get()
            if isinstance(outcome, Outcome):
                unread.append(outcome)
        return unread

    def _send_all(self) -> None:
        try:
            while not self._stopped.is_set():
                with self._lock:
                    prompt = next(self._left, None)
                if prompt is None:
                    return
                outcome = self._send(prompt)
                if outcome is not None:
                    self._outcomes.put(outcome)
        finally:
            self._outcomes.put(None)

    def _send(self, prompt: Prompt) -> Outcome | None:
        """Returns the outcome; None if it was stopped or the server is unreachable."""
        body = {"model": self._model} | dict(prompt.body)
        for attempt in range(MOST_RETRIES + 1):
            try:
                reply = self._server.request("POST", prompt.endpoint, body, self._connections)
                return _outcome(prompt.line, reply)
            except UnreachableError as error:
                self.unreachable = error
                self._stopped.set()
                return None
            except RequestError as error:
                if self._stopped.is_set():
                    return None  # aborted
                if not isinstance(error, _RetryableError):
                    return Outcome(prompt.line, str(error))
                if attempt == MOST_RETRIES:
                    return Outcome(prompt.line, f"{error} (sent {attempt + 1} times)")
                if error.after > MOST_RETRY_AFTER_SECONDS:
                    return Outcome(prompt.line, f"{error} (the server asks to wait {error.after:,.0f} s)")
                self._pause(max(error.after, FIRST_BACKOFF_SECONDS * 2**attempt))
        raise AssertionError("the last attempt returns")


def _outcome(line: int, reply: dict[str, Any]) -> Outcome:
    """Reads the token counts of a response."""
    usage = reply.get("usage") or {}
    prompt_tokens = _number(usage, "prompt_tokens")
    if prompt_tokens is None:
        return Outcome(line, "the response has no usage.prompt_tokens: is this an OpenAI-compatible server?")
    params = reply.get("kv_transfer_params")
    report = params.get("kv_offload") if isinstance(params, dict) else None
    hits = report.get("hit_tokens") if isinstance(report, dict) else None
    return Outcome(
        line,
        prompt_tokens=prompt_tokens,
        cached_tokens=_number(usage.get("prompt_tokens_details"), "cached_tokens"),
        hit_tokens={tier: _number(hits, tier) or 0 for tier in hits} if isinstance(hits, dict) else None,
    )


def _number(values: Any, name: str) -> int | None:
    value = values.get(name) if isinstance(values, dict) else None
    return value if type(value) is int and value >= 0 else None


def _message(content: bytes) -> str:
    """Returns the error message of a response: OpenAI's, FastAPI's, or the text."""
    try:
        parsed = json.loads(content)
    except (ValueError, RecursionError):
        parsed = None
    if isinstance(parsed, dict):
        error = parsed.get("error", parsed)
        for found in (error, parsed.get("detail"), error.get("message") if isinstance(error, dict) else None):
            if isinstance(found, str) and found:
                return found
    return content.decode("utf-8", errors="replace").strip() or "no message"


def _text(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return str(error)
    return getattr(error, "strerror", None) or str(error).strip() or type(error).__name__
