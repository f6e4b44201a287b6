# SPDX-License-Identifier: Apache-2.0
"""Offline inference with vLLM's ``LLM``: reloads an evicted prompt from host memory, and from disk when the
script runs again on the same directory.

    python examples/offline.py MODEL [--directory /var/cache/kv]
"""

from __future__ import annotations

import argparse

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--directory", default="/var/cache/kv")
    arguments = parser.parse_args()

    llm = LLM(
        arguments.model,
        enforce_eager=True,
        kv_transfer_config=KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_connector_extra_config={
                "spec_name": "KVOffloadSpec",
                "spec_module_path": "kv_offload.specs",
                "cpu_bytes_to_use": "1GiB",
                "secondary_tiers": [{"type": "fs", "root_dir": arguments.directory, "max_bytes": "4GiB"}],
            },
        ),
    )
    document = "The quick brown fox jumps over the lazy dog. " * 100
    for question in ("What does the fox do?", "What does the dog do?"):
        (output,) = llm.generate([document + question], SamplingParams(temperature=0, max_tokens=16))
        tokens = len(output.prompt_token_ids)
        print(f"{question} {output.num_cached_tokens} of {tokens} tokens were not computed")
        # Empty vLLM's own cache, so that the next question uses ours.
        llm.reset_prefix_cache()


if __name__ == "__main__":
    main()
