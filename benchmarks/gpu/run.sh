#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Tests and measures the copier on a machine with a GPU, in at most nine minutes on 16 cores: builds the CUDA copier
# for that machine, runs its tests, runs the kernels under compute-sanitizer, and measures.
#
#   bash benchmarks/gpu/run.sh                 all parts; parts that succeeded with the same programs are skipped
#   bash benchmarks/gpu/run.sh tests bench     some parts, even if they succeeded before
#   bash benchmarks/gpu/run.sh --fake-cuda     runs everything without a GPU (the figures are meaningless and not saved)
#   bash benchmarks/gpu/run.sh --carry         copies fmt and googletest of this machine into build/carried, for a
#                                              machine without network that does not have them
#
# Needs nvcc 12.8 or newer, g++ 12, CMake 3.23 and Python 3.10; fmt and googletest from the system or from
# build/carried. Parts: build (always; takes a second without changes) tests memcheck bench. Logs and completed parts:
# build/gpu. Results: benchmarks/results, with the machine's name. If $OUT is set, they are copied there, even if a part
# was interrupted.
#
# The tools racecheck and synccheck are not used: the kernels have no shared memory and no barriers.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit
fake_cuda='' named='' parts=() folder=build/gpu
for word in "$@"; do
  case $word in
    --fake-cuda) fake_cuda=1 folder=build/gpu-fake-cuda ;;
    --carry)
      mkdir -p build/carried/include &&
        cp -rL /usr/include/fmt build/carried/include/ && cp -rL /usr/src/googletest build/carried/ &&
        du -sh build/carried
      exit
      ;;
    build) named=1 ;; # as always
    tests | memcheck | bench) named=1 parts+=("$word") ;;
    *) echo "no part '$word'; there are: build tests memcheck bench" >&2; exit 2 ;;
  esac
done
mkdir -p "$folder"
export PATH=$PATH:/usr/local/cuda/bin
# Streams that share a connection wait for each other, by default from the ninth stream on. In some tests one stream is
# blocked and others must continue. (The benchmark has the default, like an engine.)
case ${KV_OFFLOAD_GPU_PART:-} in tests | memcheck) export CUDA_DEVICE_MAX_CONNECTIONS=32 ;; esac
generator=() # Ninja if it is installed
command -v ninja >/dev/null && generator=(-G Ninja)

part_build() {
  cmake -S benchmarks/gpu -B "$folder/build" "${generator[@]}" -DKV_OFFLOAD_FAKE_CUDA="${fake_cuda:-OFF}" &&
    cmake --build "$folder/build" -j "${JOBS:-$(nproc)}"
}
part_tests() {
  [ -n "$fake_cuda" ] || nvidia-smi --query-gpu=name,driver_version,pcie.link.gen.current,pcie.link.width.current --format=csv
  [ -z "$fake_cuda" ] || export KV_OFFLOAD_GPU_SECONDS=1 KV_OFFLOAD_GPU_CASES=20
  has_run_one && "$folder/build/gpu_tests"
}
# All tests skip without a GPU, which is not a success. (A pipe to grep would end the tests at the first match.)
has_run_one() {
  local one
  one=$("$folder/build/gpu_tests" --gtest_filter='*pinning_reports*') || { echo "$one"; return 1; }
  [[ $one == *"[       OK ]"* ]] || { echo "no test has run: there is no GPU that CUDA can use"; return 1; }
}
# Few cases, because each kernel is about ten times slower. Only memory accesses of kernels are checked: some tests cause
# API errors on purpose.
part_memcheck() {
  if [ -n "$fake_cuda" ]; then
    echo "compute-sanitizer does not support the fake CUDA runtime: the tests run without it"
    KV_OFFLOAD_GPU_SECONDS=1 KV_OFFLOAD_GPU_CASES=5 "$folder/build/gpu_tests" --gtest_filter='*Paths*'
    return
  fi
  has_run_one && KV_OFFLOAD_GPU_SECONDS=5 KV_OFFLOAD_GPU_CASES=15 compute-sanitizer --tool memcheck \
    --report-api-errors no --error-exitcode 9 "$folder/build/gpu_tests" --gtest_filter='*Paths*:*random_jobs*:*refused*'
}
part_bench() { python3 benchmarks/copy_gpu.py --program "$folder/build/copy_gpu" ${fake_cuda:+--quick}; }

# Time limits, 540 s in total on 16 cores and a PCIe 5 link; KV_OFFLOAD_GPU_SLOWER=3 makes each three times as long.
slower=${KV_OFFLOAD_GPU_SLOWER:-1}
declare -A seconds=([build]=$((110 * slower)) [tests]=$((80 * slower)) [memcheck]=$((80 * slower)) [bench]=$((270 * slower)))
if [ "${KV_OFFLOAD_GPU_PART:-}" != "" ]; then
  "part_$KV_OFFLOAD_GPU_PART"
  exit
fi
failed=()
gpu=$([ -n "$fake_cuda" ] || nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null) # that the figures are of
run() { # part
  rm -f "$folder/$1.done"
  local begun=$SECONDS
  printf '==== %s\n' "$1"
  if KV_OFFLOAD_GPU_PART=$1 timeout --kill-after=5 "${seconds[$1]}" bash benchmarks/gpu/run.sh \
    ${fake_cuda:+--fake-cuda} 2>&1 | tee "$folder/$1.log" | tail -n "${KV_OFFLOAD_GPU_LINES:-60}"; then
    printf '%s' "$gpu" >"$folder/$1.done"
    printf '%s: done in %d s\n' "$1" $((SECONDS - begun))
  else
    failed+=("$1")
    printf '%s: FAILED after %d s; the whole log is %s\n' "$1" $((SECONDS - begun)) "$folder/$1.log"
    return 1
  fi
}
was_done() { # part
  local done=$folder/$1.done
  [ "$done" -nt "$folder/build/gpu_tests" ] && [ "$done" -nt "$folder/build/copy_gpu" ] && [ "$(<"$done")" = "$gpu" ]
}
[ -n "$named" ] || parts=(tests memcheck bench)
touch "$folder/begun"
if run build; then
  for part in "${parts[@]}"; do
    if [ -z "$named" ] && was_done "$part"; then echo "$part: succeeded before, skipped"; else run "$part"; fi
  done
fi
if [ -n "${OUT:-}" ]; then
  cp "$folder"/*.log "$OUT"
  find benchmarks/results -name 'copy_gpu-*' -newer "$folder/begun" -exec cp {} "$OUT" \;
fi
[ ${#failed[@]} -eq 0 ] || { echo "FAILED: ${failed[*]}"; exit 1; }
