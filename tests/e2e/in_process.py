# SPDX-License-Identifier: Apache-2.0
"""Runs one engine in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0) as a JSON job describes it.

    python in_process.py JOB ANSWERS

The job holds ``options`` for vLLM's LLM, ``prompts`` (lists of token ids) and ``rounds``. A round names the
method to call before all prompts are sent one by one, and the number of new records that must be under
``root`` before the round ends. ANSWERS receives the answers of each round and the names of the files that the
engine leaves in shared memory.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "python"))

import shared_memory
from live_root import records_in
from vllm import LLM, SamplingParams

SAMPLING = SamplingParams(temperature=0, max_tokens=4, logprobs=8, ignore_eos=True)


def ask(llm: LLM, tokens: list[int]) -> dict[str, Any]:
    (output,) = llm.generate([{"prompt_token_ids": tokens}], SAMPLING, use_tqdm=False)
    (completion,) = output.outputs
    steps = zip(completion.token_ids, completion.logprobs or (), strict=True)
    return {
        "token_ids": list(completion.token_ids),
        "logprobs": [step[token].logprob for token, step in steps],
        "cached_tokens": output.num_cached_tokens,
    }


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    llm = LLM(enforce_eager=True, disable_log_stats=False, **job["options"])
    calls = {
        "nothing": lambda: None,
        "reset vLLM's cache": lambda: llm.reset_prefix_cache(),
        "reset both caches": lambda: llm.reset_prefix_cache(reset_connector=True),
    }
    root, rounds = Path(job["root"]), []
    for name, records in job["rounds"]:
        calls[name]()
        before = set(records_in(root))
        rounds.append([ask(llm, prompt) for prompt in job["prompts"]])
        deadline = time.monotonic() + 240
        while len(set(records_in(root)) - before) < records:
            if time.monotonic() > deadline:
                raise TimeoutError(f"there are not {records} new records under {root}")
            time.sleep(0.02)  # the writer threads belong to this process
    files = shared_memory.mapped([os.getpid()])
    llm.llm_engine.engine_core.shutdown()
    answers = {"rounds": rounds, "left": sorted(shared_memory.left(files))}
    Path(sys.argv[2]).write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
