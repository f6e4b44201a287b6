#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Fast checks after a change, in seconds:
#
#   bash tests/loop.sh core [GTEST_FILTER]       the core's unit tests; needs neither Python's packages nor vLLM
#   bash tests/loop.sh adapter [PYTEST ARGS...]  the adapter against the installed vLLM, the command line, the bindings
#
# `core` uses a build of its own (build/dev: one object per file, so that a change compiles one
# file). `adapter` needs one earlier run of `bash tests/run.sh lint`. Long random tests are
# shortened here; tests/run.sh is the full check.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export CCACHE_BASEDIR=$PWD CCACHE_NOHASHDIR=1
jobs=${JOBS:-$(nproc)}

core() {
  [ -e build/dev/build.ninja ] || cmake --preset dev >build/dev.log || { cat build/dev.log; return 1; }
  ninja -C build/dev -j "$jobs" --quiet kv_offload_tests
  local shard status=0
  local -a running=()
  for ((shard = 0; shard < jobs; shard++)); do
    KV_OFFLOAD_SOAK=0.1 GTEST_TOTAL_SHARDS=$jobs GTEST_SHARD_INDEX=$shard \
      build/dev/kv_offload_tests --gtest_brief=1 --gtest_filter="${1:-*}" &
    running+=($!)
  done
  for shard in "${running[@]}"; do wait "$shard" || status=1; done
  return $status
}
adapter() {
  ninja -C build/cpp -j "$jobs" --quiet _core
  local contract=tests/python/test_contract.py::test_manager_worker_and_spec_keep_vllms_contract
  [ $# -gt 0 ] || set -- tests/python --deselect tests/python/test_oracle.py --deselect tests/python/test_monitoring.py \
    --deselect "${contract}[0.31]" --deselect "${contract}[0.33]"
  .venv/bin/python -m pytest -q --durations=5 "$@"
}

case ${1:-} in
  core | adapter) "$@" ;;
  *) sed -n '3,/^set/{/^#/s/^# \{0,1\}//p}' "$0"; exit 2 ;;
esac
