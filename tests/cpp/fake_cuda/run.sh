#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds and runs the CUDA copier on the fake CUDA runtime. Needs g++ (sanitizers: clang, which is
# twice as fast there), CMake and the libraries of the core. Needs no CUDA toolkit and no GPU.
#
#   bash tests/cpp/fake_cuda/run.sh                     once, with three seeds
#   bash tests/cpp/fake_cuda/run.sh --sanitize thread   under ThreadSanitizer (address,undefined: those)
#   bash tests/cpp/fake_cuda/run.sh --seeds 20 'Order*' more seeds, some tests
#   ... --mutant                                              exit 0 if it does not compile: not detected
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.." || exit
seeds=3 kinds='' mutant='' filter='*'
while [ $# -gt 0 ]; do
  case $1 in
    --sanitize) kinds=$2; shift ;;
    --seeds) seeds=$2; shift ;;
    --mutant) mutant=1 ;;
    *) filter=$1 ;;
  esac
  shift
done
export CCACHE_BASEDIR=$PWD CCACHE_NOHASHDIR=1 CCACHE_SLOPPINESS=pch_defines,time_macros
folder=build/threads${kinds:+-${kinds%%,*}}
mkdir -p build
if ! cmake -S . -B "$folder" -G Ninja -DKV_OFFLOAD_DEVELOPER=ON -DKV_OFFLOAD_CUDA=OFF -DKV_OFFLOAD_TORCH=OFF \
  -DCMAKE_BUILD_TYPE=None -DCMAKE_CXX_FLAGS=-g1 -DKV_OFFLOAD_SANITIZE="$kinds" \
  ${kinds:+-DCMAKE_CXX_COMPILER=clang++ -DKV_OFFLOAD_UNITY=ON} >"$folder.log" ||
  ! ninja -C "$folder" -j "${JOBS:-$(nproc)}" --quiet fake_cuda_tests >>"$folder.log"; then
  cat "$folder.log"
  [ -z "$mutant" ] || { echo "it does not compile"; exit 0; }
  exit 1
fi
# A test that hangs is a failure; the output names it.
limit=$((mutant ? 60 + 60 * seeds : 180 + 120 * seeds))
KV_OFFLOAD_GPU_SECONDS=${KV_OFFLOAD_GPU_SECONDS:-1} KV_OFFLOAD_GPU_CASES=${KV_OFFLOAD_GPU_CASES:-40} \
  TSAN_OPTIONS=halt_on_error=1 UBSAN_OPTIONS=print_stacktrace=1 \
  timeout --kill-after=5 "${KV_OFFLOAD_THREADS_TIMEOUT:-$limit}" \
  "$folder/tests/cpp/fake_cuda/fake_cuda_tests" --gtest_repeat="$seeds" --gtest_filter="$filter" \
  ${mutant:+--gtest_fail_fast} >"$folder-run.log" 2>&1
status=$?
if [ $status -ne 0 ]; then
  grep -vE '^\[ +OK|^\[---|^\[ +RUN|^$' "$folder-run.log" | head -n 80
  [ $status -ne 124 ] || { echo "not done in time; the last test:"; tail -n 1 "$folder-run.log"; }
else
  grep -E '^\[  PASSED' "$folder-run.log" | tail -n 1
fi
exit $status
