# SPDX-License-Identifier: Apache-2.0
"""The names under which vLLM finds the spec. Imports nothing, because every process of vLLM loads it."""

SPEC_NAME = "KVOffloadSpec"
SPEC_MODULE = "kv_offload.specs"
