# SPDX-License-Identifier: Apache-2.0
"""Answers router_index.py with the scores of Dynamo's own indexer. Runs in an environment with
ai-dynamo-runtime (and without vLLM); reads JSON lines from stdin and answers each with one line.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from dynamo.llm import SelectionService  # type: ignore[import-not-found]

MODEL = "model"


async def answer(service: Any, order: dict[str, Any]) -> dict[str, Any]:
    if order["do"] == "add":
        await service.upsert_worker(
            {
                "worker_id": order["worker"],
                "model_name": MODEL,
                "endpoint": "http://127.0.0.1:1",
                "block_size": order["block_size"],
                "data_parallel_start_rank": 0,
                "data_parallel_size": 1,
                "max_num_batched_tokens": 8192,
                "total_kv_blocks": 1 << 20,
                "kv_events_endpoints": {0: order["events"]},
            }
        )
        return {}
    if order["do"] == "remove":
        await service.delete_worker(order["worker"])
        return {}
    request = {"model_name": MODEL, "token_ids": order["tokens"]}
    return dict(await service.overlap_scores(request))


async def main() -> None:
    service = SelectionService(indexer_threads=1)
    for line in sys.stdin:
        print(json.dumps(await answer(service, json.loads(line))), flush=True)
    service.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
