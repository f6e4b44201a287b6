# SPDX-License-Identifier: Apache-2.0
"""An agent loop with the OpenAI client for Python that sends the server hints about its session.

    pip install openai
    python examples/agent_hints.py MODEL [--url http://localhost:8000/v1]

Every turn names the session. A tool call is followed by a short request that reports how long the tool
usually takes, so that the server keeps the prompt in host memory if the pause is short. The last request
releases the session. docs/hints.md describes the hints.
"""

from __future__ import annotations

import argparse
import time
import uuid
from typing import Any

SYSTEM = (
    "You are a careful assistant. Call the tool `clock` to learn the time. "
    + "Answer in one sentence. " * 200
)
TOOLS = [{"type": "function", "function": {"name": "clock", "description": "Returns the time."}}]
TOOL_SECONDS = {"clock": 2.0}  # how long each tool usually takes


class Session:
    """One conversation. Its name must be hard to guess: a client that knows it can send hints about it."""

    def __init__(self, client: Any, model: str) -> None:
        self._client, self._model = client, model
        self.name = str(uuid.uuid4())
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]

    def ask(self, *actions: dict[str, Any]) -> Any:
        """Sends all messages as a turn of the session, with hints about its prompt."""
        hints = {"version": 1, "session": self.name, "actions": list(actions)}
        answer = self._send(self.messages, hints, tools=TOOLS)
        message = answer.choices[0].message
        self.messages.append(message.model_dump(exclude_none=True))
        return message

    def tell(self, action: dict[str, Any]) -> None:
        """Sends a hint in a separate request. Its prompt must begin like those of the session."""
        hints = {"version": 1, "actions": [{**action, "target": {"session": self.name}}]}
        self._send([*self.messages[:1], {"role": "user", "content": "."}], hints, tools=TOOLS, max_tokens=1)

    def _send(self, messages: list[dict[str, Any]], hints: dict[str, Any], **options: Any) -> Any:
        return self._client.chat.completions.create(
            model=self._model,
            messages=messages,
            extra_body={"kv_transfer_params": {"kv_offload_hints": hints}},
            **options,
        )


def run(client: Any, model: str, task: str, most_turns: int = 8) -> str:
    """Runs the agent until it answers without a tool call."""
    session = Session(client, model)
    session.messages.append({"role": "user", "content": task})
    for _ in range(most_turns):
        message = session.ask()
        if not message.tool_calls:
            break
        pause = sum(TOOL_SECONDS.get(call.function.name, 60.0) for call in message.tool_calls)
        session.tell({"type": "resume_in", "seconds": pause})
        for call in message.tool_calls:
            session.messages.append(
                {"role": "tool", "tool_call_id": call.id, "content": time.strftime("%H:%M:%S")}
            )
    session.tell({"type": "release"})
    return str(session.messages[-1].get("content"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--url", default="http://localhost:8000/v1")
    arguments = parser.parse_args()

    from openai import OpenAI

    print(run(OpenAI(base_url=arguments.url, api_key="none"), arguments.model, "What time is it?"))


if __name__ == "__main__":
    main()
