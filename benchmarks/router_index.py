# SPDX-License-Identifier: Apache-2.0
"""Measures the precision of a router's index: advertised prefixes that are loaded when they are requested.

Dynamo's own indexer (SelectionService of ai-dynamo-runtime), or llm-d's, subscribes to vLLM's ZMQ publisher.
The engine is vLLM's real scheduler and connector with a fake model (tests/python/oracle), in a process of
its own. It serves conversations under eviction, resets and kills. Each turn is a probe: the router's score
for the prompt is read first, then the prompt is sent, and the tokens that were not computed are compared with
the score.
Baselines in the same run: vLLM's form of the events, and vLLM's own TieringOffloadingSpec.

    python -m venv dynamo && dynamo/bin/pip install ai-dynamo-runtime==1.6.1
    python benchmarks/router_index.py --dynamo-python dynamo/bin/python

llm-d's indexer is a program that is built from its sources (llmd_scores.go says how):

    python benchmarks/router_index.py --llmd llmd/llmd_scores
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from reporting import describe_machine, echo, write_results

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent / "tests" / "python"
WAIT_SECONDS = 120
BLOCK = 16
HOST_BYTES, DISK_BYTES = "256KiB", "2MiB"
MODEL = "model"
TOPIC = f"kv@127.0.0.1:8000@{MODEL}"  # llm-d reads the name of the model from it
LONGEST = 280  # tokens of a conversation, which then begins again


@dataclass(frozen=True)
class Case:
    """One configuration.

    ``form``: ours, blocks (kv_events_unit), vllm (events as vLLM forms them) or tiering (vLLM's own spec).
    """

    tier: str
    blocks: int = 1
    form: str = "ours"
    shared: bool = False  # a second engine shares the directory and evicts there
    evicts: bool = False  # the Redis server evicts records
    kills: bool = True
    watches: bool = True  # False: as releases that did not look for removals by another server
    pause: float = 0  # seconds between a request and the next probe
    # for llm-d only
    unit: int = 0  # tokens of a block of the index; 0: the block size that the events state
    tenants: str = ""  # salt, or lora: half of the conversations have one
    in_place: str = ""  # a killed engine starts again at its address; replay: with vLLM's replay socket

    @property
    def name(self) -> str:
        kind = " of two servers" if self.shared else " that evicts" if self.evicts else ""
        more = [f"index of {self.unit} tokens"] if self.unit else []
        more += [self.tenants] if self.tenants else []
        more += [f"starts in place, {self.in_place}"] if self.in_place else []
        more += [] if self.watches else ["removals not watched"]
        more += [f"{self.pause:g} s between probes"] if self.pause else []
        return ", ".join([f"{self.tier}{kind}", f"{self.blocks} blocks", self.form, *more])

    @property
    def size(self) -> int:
        """Tokens of a block of the index. Dynamo drops events with another block size."""
        return self.unit or (BLOCK if self.form in ("vllm", "blocks") else BLOCK * self.blocks)


CASES = [
    Case("fs"),
    Case("fs", 4),
    Case("fs", 4, "blocks"),
    Case("fs", 4, "vllm"),
    Case("redis"),
    Case("s3"),
    Case("fs", 1, "tiering"),
    *(
        Case(tier, shared=tier == "fs", evicts=tier == "redis", watches=watches, pause=pause)
        for tier in ("fs", "redis")
        for pause in (0, 0.5)
        for watches in (False, True)
    ),
]
LLMD_CASES = [
    *CASES,
    Case("fs", 4, unit=BLOCK),
    Case("fs", tenants="salt"),
    Case("fs", tenants="lora"),
    Case("fs", in_place="no replay"),
    Case("fs", in_place="replay"),
]


# ---- the engine's process


def serve(options: dict[str, Any], orders: Connection) -> None:
    """Runs one engine; reads orders and answers each."""
    log = os.open(options["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= options["environment"]
    if options["form"] != "tiering":
        import adapter

        adapter.use_specs()
    from oracle.engine import Engine, Setup
    from oracle.idle import IdleLoop
    from vllm.distributed.kv_events import BlockStored, KVEventBatch, ZmqEventPublisher

    if options["form"] == "vllm":
        from kv_offload.specs import events

        events.describe_chunks = lambda **_: None
    if not options["watches"]:
        from kv_offload.specs.spec import KVOffloadSpec

        KVOffloadSpec._watch_removals = lambda *_: False
    setup = Setup(extra=options["extra"], layers=4, events=True, num_blocks=40)
    engine = Engine(setup, f"router-{os.getpid()}", options["model_dir"])
    publisher = ZmqEventPublisher(
        0, endpoint=options["events"], replay_endpoint=options["replay"], topic=TOPIC
    )
    engine.scheduler.kv_event_publisher = publisher
    lookups = watch_lookups(engine, options)

    def mark(tokens: list[int], size: int) -> None:
        # llm-d drops the message if a hash is an integer that msgpack encodes in less than 64 bits.
        stored = BlockStored([1 << 63 | tokens[0]], None, tokens, size, None, "GPU", None)
        publisher.publish(KVEventBatch(ts=time.time(), events=[stored]))

    def settle() -> None:
        engine.drain()
        if options["form"] != "tiering":
            while engine.manager._cache.tier_stats(0)["queued_writes"]:
                engine.step_idle()
        for _ in range(3):
            engine.step_idle()

    orders.send({"model_dir": engine.model_dir})
    number = 0
    loop = IdleLoop(engine, iter(orders.recv, None))
    while (order := loop.next()) is not None:
        reply: dict[str, Any] = {}
        if order["do"] == "request":
            number += 1
            engine.add(f"r{number}", order["tokens"], order["generate"], order["salt"], lora=order["lora"])
            settle()
            sequence = engine.ranks[0][2].sequences[f"r{number}"]
            length = len(order["tokens"])
            reply = {"found": sequence.found, "tokens": sequence.tokens[: length + order["generate"]]}
            reply |= lookups.pop(f"r{number}", {})
        elif order["do"] == "reset":
            reply = {"done": engine.reset(running=False)}
            settle()
        elif order["do"] == "mark":
            mark(order["tokens"], order["size"])
        orders.send(reply)


def watch_lookups(engine: Any, options: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Records two facts when vLLM first looks a request up: the tokens of its prompt that the GPU has, and
    those that host memory or the directory hold as whole chunks, without the plugin's own lookup.

    Returns the facts by request; only for chunks of several blocks in a directory.
    """
    found: dict[str, dict[str, int]] = {}
    root = options["extra"]["secondary_tiers"][0].get("root_dir")
    if options["extra"]["blocks_per_chunk"] == 1 or root is None or options["form"] == "tiering":
        return found
    from live_root import paths_in

    connector = engine.scheduler.connector.connector_scheduler
    original = connector.get_num_new_matched_tokens

    def stored() -> set[bytes]:
        paths = paths_in(Path(root))
        newest = max(
            (int(name[1]) for path in paths if (name := re.match(r"g(\d+)\b", path.name))), default=0
        )
        records = [
            path for path in paths if path.suffix == ".rec" and path.parent.parent.name == f"g{newest}"
        ]
        return {bytes.fromhex(record.name.split(".")[0]) for record in records}

    def get_num_new_matched_tokens(request: Any, computed: int, *more: Any, **named: Any) -> Any:
        if request.request_id not in found:
            status = connector._req_status[request.request_id]
            status.update_offload_keys()
            keys = status.group_states[0].offload_keys
            missing = set(map(bytes, engine.manager._cache.absent(keys))) - stored()
            held = next((at for at, key in enumerate(keys) if bytes(key) in missing), len(keys))
            size = BLOCK * options["extra"]["blocks_per_chunk"]
            found[request.request_id] = {"gpu": computed, "held": held * size}
        return original(request, computed, *more, **named)

    connector.get_num_new_matched_tokens = get_num_new_matched_tokens
    return found


class EngineProcess:
    """A process of ``serve``. It is forked from a server process that has imported vLLM once."""

    context = multiprocessing.get_context("forkserver")

    @classmethod
    def prepare(cls) -> None:
        """Sets what the server process needs before the first engine starts."""
        os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1", "VLLM_TARGET_DEVICE": "cpu"}
        sys.path[:0] = [str(TESTS), str(HERE)]
        paths = [*sys.path[:2], os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        cls.context.set_forkserver_preload(["oracle.idle", "kv_offload._core"])

    def __init__(self, options: dict[str, Any]) -> None:
        self.orders, theirs = self.context.Pipe()
        self.process = self.context.Process(target=serve, args=(options, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def read(self) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = self.orders.recv()
        except EOFError:
            self.process.join()
            raise RuntimeError(f"the engine's process ended with {self.process.exitcode}") from None
        return answer

    def ask(self, **order: Any) -> dict[str, Any]:
        self.orders.send(order)
        return self.read()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.orders.close()


class Child:
    """A process that answers JSON lines."""

    def __init__(self, command: list[str], log: Path) -> None:
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log.open("ab"), text=True
        )

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process ended with {self.process.wait()}: {self.process.args!r}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, **order: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return self.read()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Server:
    """An engine's process, started again after each kill."""

    numbers = iter(range(1, 1 << 20))

    def __init__(self, case: Case, tiers: list[dict[str, Any]], router: Child, log: Path) -> None:
        self.case, self.tiers, self.router, self.log = case, tiers, router, log
        self.model_dir: str | None = None
        self.number = next(self.numbers)
        self.port, self.replay_port = free_port(), free_port()
        self.start()

    def start(self) -> None:
        replay = f":{self.replay_port}" if self.case.in_place == "replay" else ""
        extra: dict[str, Any] = {
            "cpu_bytes_to_use": HOST_BYTES,
            "blocks_per_chunk": self.case.blocks,
            "self_describing_kv_events": True,
            "secondary_tiers": self.tiers,
        }
        if self.case.form == "tiering":
            extra |= {"spec_name": "CpuTieringSpec", "spec_module_path": "vllm_tiering_on_cpu"}
            extra["cpu_bytes_to_use"] = 256 << 10
        else:
            extra |= {"load_policy": "always", "lookup_timeout_ms": 60_000}
            if self.case.form == "blocks":
                extra |= {"kv_events_unit": "block"}
        options = {
            "extra": extra,
            "form": self.case.form,
            "watches": self.case.watches,
            "model_dir": self.model_dir,
            "events": f"tcp://*:{self.port}",
            "replay": f"tcp://*{replay}" if replay else None,
            "log": str(self.log),
            "environment": {name: value for name, value in os.environ.items() if name.startswith("AWS_")},
        }
        self.child = EngineProcess(options)
        self.model_dir = self.child.read()["model_dir"]
        self.size = self.case.size
        self.router.ask(
            do="add",
            worker=self.number,
            block_size=self.size,
            events=f"tcp://127.0.0.1:{self.port}",
            replay=f"tcp://127.0.0.1{replay}" if replay else "",
        )
        self.until_heard()

    def until_heard(self) -> None:
        """Waits until the router has applied all events so far."""
        deadline = time.monotonic() + WAIT_SECONDS
        tokens = [random.randrange(10_000, 1 << 30) for _ in range(self.size)]
        self.child.ask(do="mark", tokens=tokens, size=self.size)
        while not self.score(tokens):
            if time.monotonic() > deadline:
                raise TimeoutError("the router does not receive the events")
            time.sleep(0.005)
            if int(time.monotonic() * 10) % 10 == 0:  # a new subscriber may have missed the first one
                self.child.ask(do="mark", tokens=tokens, size=self.size)

    def score(self, tokens: list[int]) -> int:
        """Returns the tokens of the prompt that the router believes this server to hold."""
        return max(self.scores(tokens).values(), default=0)

    def scores(self, tokens: list[int], salt: str | None = None, lora: str | None = None) -> dict[str, int]:
        """Returns the tokens of the prompt's prefix by medium; ``any``, by llm-d: on any medium."""
        asked = {"tokens": tokens, "model": lora or MODEL, "cache_salt": salt or ""}
        for worker in self.router.ask(do="score", **asked)["workers"]:
            if worker["worker_id"] == self.number:
                tiers = ("device", "host_pinned", "disk", "any")
                return {tier: worker.get(f"{tier}_blocks", 0) * self.size for tier in tiers}
        return {}

    def kill(self) -> None:
        self.child.kill()
        if not self.case.in_place:  # then it starts again as a new worker, at a new address
            self.router.ask(do="remove", worker=self.number)
            self.number = next(self.numbers)
            self.port = free_port()


@dataclass
class Counts:
    probes: int = 0
    advertised: int = 0  # probes with an advertised prefix
    hit: int = 0  # of these: at least that prefix was found
    advertised_tokens: int = 0
    found_of_advertised: int = 0
    found_tokens: int = 0
    beyond_device: int = 0  # advertised tokens beyond GPU memory
    resets: int = 0
    kills: int = 0
    # of the rest: vLLM loads nothing if the GPU has all but less than a chunk of the prefix
    less_than_a_chunk: int = 0
    by_rule: int = 0  # of these: shown to be so by what the GPU and the tiers held at the lookup
    short: list[dict[str, Any]] = field(default_factory=list)

    def add(self, scores: dict[str, int], reply: dict[str, Any], chunk: int) -> None:
        longest, found = max(scores.values(), default=0), reply["found"]
        self.probes += 1
        self.advertised += longest > 0
        self.hit += 0 < longest <= found
        self.advertised_tokens += longest
        self.found_of_advertised += min(longest, found)
        self.found_tokens += found
        self.beyond_device += longest - scores.get("device", 0)
        if longest > found:
            self.less_than_a_chunk += longest - found < chunk
            facts: dict[str, Any] = {name: reply[name] for name in ("gpu", "held") if name in reply}
            is_rule = bool(facts) and longest - found < chunk
            is_rule = is_rule and facts["gpu"] == found and facts["held"] >= longest
            self.by_rule += is_rule
            self.short.append({"is_rule": is_rule, "advertised": longest, "found": found, **facts, **scores})

    def figures(self) -> dict[str, Any]:
        return {
            "probes": self.probes,
            "advertised": self.advertised,
            "advertised_then_hit": self.hit / self.advertised if self.advertised else None,
            "token_precision": self.found_of_advertised / self.advertised_tokens
            if self.advertised_tokens
            else None,
            "token_recall": self.found_of_advertised / self.found_tokens if self.found_tokens else None,
            "share_beyond_device": self.beyond_device / self.advertised_tokens
            if self.advertised_tokens
            else None,
            "short_by_less_than_a_chunk": self.less_than_a_chunk,
            "short_by_rule_of_vllm": self.by_rule,
            "resets": self.resets,
            "kills": self.kills,
            "short": sorted(self.short, key=lambda each: each["is_rule"])[:20],
        }


@contextmanager
def tiers_of(case: Case, directory: Path) -> Iterator[list[dict[str, Any]]]:
    """Yields the tiers of a case and runs their server."""
    sys.path.insert(0, str(TESTS))
    with ExitStack() as stack:
        if case.tier == "fs":
            tier: dict[str, Any] = {"type": "fs", "root_dir": str(directory / "root")}
            if case.form == "tiering":
                tier |= {"enable_kv_events": True}
            else:
                tier |= {"max_bytes": DISK_BYTES}
        elif case.tier == "redis":
            from redis_server import redis_server

            limit = ("--maxmemory", "4mb", "--maxmemory-policy", "allkeys-lru") if case.evicts else ()
            tier = {"type": "redis", "url": f"unix://{stack.enter_context(redis_server(directory, *limit))}"}
        else:
            from s3_server import ACCESS, BUCKET, SECRET, S3Server

            server = S3Server(directory)
            os.environ |= {"AWS_ACCESS_KEY_ID": ACCESS, "AWS_SECRET_ACCESS_KEY": SECRET}
            server.start()
            stack.callback(server.kill)
            tier = {"type": "s3", "bucket": BUCKET, "endpoint": server.endpoint}
        yield [tier]


def start_router(case: Case, arguments: argparse.Namespace, directory: Path) -> Child:
    if arguments.llmd:
        command = [arguments.llmd, f"--block-size={case.size}"]
    else:
        command = [arguments.dynamo_python, str(HERE / "dynamo_scores.py")]
    return Child(command, directory / "router.log")


def run(case: Case, arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    rng, counts = random.Random(arguments.seed), Counts()
    ends = time.monotonic() + 60 * arguments.minutes if arguments.minutes else math.inf
    router = start_router(case, arguments, directory)
    with tiers_of(case, directory) as tiers:
        servers = [
            Server(case, tiers, router, directory / "engine.log") for _ in range(2 if case.shared else 1)
        ]
        if case.shared:
            servers[1].model_dir = servers[0].model_dir
            servers[1].kill()
            servers[1].start()
        talks: list[list[int]] = [[] for _ in range(24)]
        for number in range(arguments.probes):
            if counts.advertised >= arguments.advertised or time.monotonic() > ends:
                break
            server = rng.choice(servers)
            turn = rng.randrange(len(talks))
            if len(talks[turn]) > LONGEST:
                # Half of the new conversations share a prefix with another one, of any length.
                other = rng.choice(talks)
                talks[turn] = other[: rng.randrange(len(other) + 1)] if rng.random() < 0.5 else []
            prompt = [*talks[turn], *(rng.randrange(1000) for _ in range(rng.randrange(1, 40)))]
            time.sleep(case.pause)
            server.until_heard()
            tenant = f"tenant-{turn % 4}" if case.tenants and turn % 2 else None
            salt, lora = (tenant, None) if case.tenants == "salt" else (None, tenant)
            scores = server.scores(prompt, salt, lora)
            reply = server.child.ask(
                do="request", tokens=prompt, generate=rng.randrange(1, 8), salt=salt, lora=lora
            )
            counts.add(scores, reply, BLOCK * case.blocks)
            talks[turn] = reply["tokens"]
            if case.kills and number % 110 == 109:
                server.kill()
                server.start()
                counts.kills += 1
            elif number % 100 == 49 and not case.shared:
                counts.resets += server.child.ask(do="reset")["done"]
            if number % 100 == 99:
                echo(f"{case.name}: {number + 1} probes, {counts.hit} of {counts.advertised} hit")
        for server in servers:
            server.kill()
    router.kill()
    return counts.figures()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    router = parser.add_mutually_exclusive_group(required=True)
    router.add_argument("--dynamo-python", help="python of an environment with Dynamo")
    router.add_argument("--llmd", help="program that was built from llmd_scores.go")
    parser.add_argument("--probes", type=int, default=220, help="requests per case")
    parser.add_argument(
        "--advertised", type=int, default=1 << 30, help="end after so many advertised prefixes"
    )
    parser.add_argument("--minutes", type=float, help="end a case after this time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--save", help="name of the results; without it, --only saves none")
    arguments = parser.parse_args()
    EngineProcess.prepare()
    echo(describe_machine()["text"])
    cases = {}
    for case in LLMD_CASES if arguments.llmd else CASES:
        if arguments.only not in case.name:
            continue
        with tempfile.TemporaryDirectory(prefix="router-index-") as directory:
            cases[case.name] = run(case, arguments, Path(directory))
        echo(f"{case.name}: {json.dumps(cases[case.name])}")
        name = arguments.save or ("llmd_scores" if arguments.llmd else "router_index")
        if arguments.save or not arguments.only:  # an interruption keeps the cases so far
            write_results(name, {"probes": arguments.probes, "seed": arguments.seed, "cases": cases})


if __name__ == "__main__":
    main()
