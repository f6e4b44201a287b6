# SPDX-License-Identifier: Apache-2.0
"""Reads a file of prompts: one request body per line, or one line of OpenAI's batch format."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from kv_offload.printable import printable

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_ENDPOINTS = {"prompt": COMPLETIONS, "messages": CHAT}
# Replaced by ONE_TOKEN, or refused by vLLM together with it.
_REPLACED = ("max_tokens", "max_completion_tokens", "min_tokens", "n", "stream", "stream_options")
_ONE_TOKEN = {"max_tokens": 1, "n": 1, "stream": False}
_MOST_LINES_NAMED = 20
_MOST_SHOWN = 60  # characters of what a line contains
_EXAMPLE = '{"prompt": "..."} or {"messages": [...]}'


@dataclass(frozen=True)
class Prompt:
    """A request that computes or loads a prompt and generates one token.

    line: its number in the file, from 1.
    body: without "model" if the line has none.
    """

    line: int
    endpoint: str
    body: Mapping[str, Any]


def read_prompts(lines: Iterable[bytes], name: str, limit: int = 0) -> list[Prompt]:
    """Reads the prompts of file ``name``; only the first ``limit``, unless it is 0. Skips empty lines.

    Raises ValueError that lists the invalid lines.
    """
    prompts: list[Prompt] = []
    problems: list[str] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            endpoint, body = _request(line)
            prompts.append(Prompt(number, endpoint, body))
        except ValueError as error:
            problems.append(f"{name}, line {number}: {error}")
        if len(prompts) + len(problems) == limit:
            break
    if problems:
        more = len(problems) - _MOST_LINES_NAMED
        shown = problems[:_MOST_LINES_NAMED] + ([f"{more:,} more"] if more > 0 else [])
        count = "1 line is" if len(problems) == 1 else f"{len(problems):,} lines are"
        raise ValueError(
            f"{count} invalid, and nothing was sent:" + "".join(f"\n  - {text}" for text in shown)
        )
    if not prompts:
        raise ValueError(f"{name} has no prompts; each line is a request body: {_EXAMPLE}")
    return prompts


def _request(line: bytes) -> tuple[str, dict[str, Any]]:
    """Returns endpoint and body. Raises ValueError that says what is wrong."""
    given = _parse(line)
    if not isinstance(given, dict):
        raise ValueError(f"{_shown(given)} is not a request body; possible: {_EXAMPLE}")
    endpoint = None
    # A line of OpenAI's batch format; its url and body must agree.
    if "body" in given:
        endpoint, given = _batch_request(given)
    found = [key for key in _ENDPOINTS if key in given]
    if len(found) != 1:
        raise ValueError(
            f"has {'both' if found else 'neither'} prompt {'and' if found else 'nor'} messages (keys: "
            f"{_keys(given)}); possible: {_EXAMPLE}"
        )
    needed = _ENDPOINTS[found[0]]
    if endpoint not in (None, needed):
        raise ValueError(f"url is {endpoint}, and body has {found[0]}; possible for {found[0]}: {needed}")
    _check_prompt(given) if needed == COMPLETIONS else _check_messages(given)
    if "model" in given and (not isinstance(given["model"], str) or not given["model"]):
        raise ValueError(f"model is {_shown(given['model'])}; possible: the name of a model, or no model")
    return needed, {key: value for key, value in given.items() if key not in _REPLACED} | _ONE_TOKEN


def _parse(line: bytes) -> Any:
    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not a JSON value")

    try:
        return json.loads(line.decode("utf-8-sig"), parse_constant=refuse)
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 (byte {error.start})") from error
    except (ValueError, RecursionError) as error:
        text = line.decode("utf-8", errors="replace").strip()
        raise ValueError(f"{_cut(text)} is not JSON ({error}); possible: {_EXAMPLE}") from error


def _batch_request(given: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns url and body of a line in OpenAI's batch format."""
    url, method, body = given.get("url"), given.get("method", "POST"), given["body"]
    if method != "POST":
        raise ValueError(f"method is {_shown(method)}; possible: POST")
    if url not in (COMPLETIONS, CHAT):
        raise ValueError(f"url is {_shown(url)}; possible: {COMPLETIONS}, {CHAT}")
    if not isinstance(body, dict):
        raise ValueError(f"body is {_shown(body)}; possible: {_EXAMPLE}")
    return str(url), body


def _check_prompt(body: dict[str, Any]) -> None:
    prompt = body["prompt"]
    is_ids = isinstance(prompt, list) and all(type(token) is int and token >= 0 for token in prompt)
    if not prompt or not (isinstance(prompt, str) or is_ids):
        raise ValueError(
            f"prompt is {_shown(prompt)}; possible: one text, or one list of token ids, and not empty"
        )


def _check_messages(body: dict[str, Any]) -> None:
    messages = body["messages"]
    if not isinstance(messages, list) or not messages or not all(isinstance(one, dict) for one in messages):
        raise ValueError(
            f'messages is {_shown(messages)}; possible: a list such as [{{"role": "user", "content": "..."}}]'
        )


def _shown(value: Any) -> str:
    return _cut(json.dumps(value, ensure_ascii=False))


def _keys(given: dict[str, Any]) -> str:
    return _cut(", ".join(given)) or "none"


def _cut(text: str) -> str:
    shown = printable(text)
    return shown if len(shown) <= _MOST_SHOWN else f"{shown[: _MOST_SHOWN - 1]}…"
