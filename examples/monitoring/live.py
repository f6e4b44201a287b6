"""This folder on a live server: serves a small model on CPU, scrapes it, draws the dashboard.

    python live.py dashboard.png --seconds 150

Conversations overflow vLLM's cache and host memory, so that prompts come back from memory and from disk.
Needs vLLM, prometheus and matplotlib; takes a minute more than asked. With --port the server is one that runs
already on this machine, under the model name "tiny".
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import picture
from dashboard import panels
from local_prometheus import prometheus
from local_server import LocalServer, kv_transfer_config

BLOCK = 128
CONVERSATIONS = 14


def talk(server: LocalServer, seconds: float) -> None:
    """Conversations that grow, picked at random, for so long."""
    choose = random.Random(0)
    histories = [[choose.randrange(2, 2048) for _ in range(8 * BLOCK)] for _ in range(CONVERSATIONS)]
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        history = histories[choose.randrange(CONVERSATIONS)]
        server.ask(history, max_tokens=4, logprobs=1)
        if len(history) < 24 * BLOCK:
            history += [choose.randrange(2, 2048) for _ in range(2 * BLOCK)]


def draw(server: LocalServer, folder: Path, seconds: float, file: Path) -> int:
    """The picture of ``seconds`` of ``server``; the number of panels with data."""
    with prometheus(f"127.0.0.1:{server.port}", folder) as base:
        start = time.time()
        talk(server, seconds)
        return picture.draw(base, file, start, time.time())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--port", type=int, help="of a server that runs already; default: one is started")
    parser.add_argument("--memory", default="96MiB", help="cpu_bytes_to_use")
    parser.add_argument("--disk", default="256MiB", help="max_bytes")
    arguments = parser.parse_args()
    if shutil.which("prometheus") is None:
        parser.error("prometheus is not installed (Debian: apt-get install prometheus)")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        log = folder / "server.log"
        if arguments.port is not None:
            log.touch()
            server = LocalServer(folder, log, port=arguments.port)
            count = draw(server, folder, arguments.seconds, arguments.file)
        else:
            from tiny_model import make_model

            model = make_model(folder / "model", "small")
            transfer = kv_transfer_config(arguments.memory, folder / "kv", arguments.disk)
            with LocalServer(model, log, blocks=40, kv_transfer=transfer) as server:
                count = draw(server, folder, arguments.seconds, arguments.file)
    print(f"{count} of {len(panels())} panels have data; {arguments.file}")


if __name__ == "__main__":
    main()
