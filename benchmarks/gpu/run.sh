#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Everything that is to be learned about the copier on a machine with a GPU, in at most nine minutes on 16 cores: builds the CUDA copier
# for that machine, runs its tests, holds the kernels under compute-sanitizer, and measures.
#
#   bash benchmarks/gpu/run.sh                 all parts; those that were done with these programs are not done again
#   bash benchmarks/gpu/run.sh tests bench     some parts, again
#   bash benchmarks/gpu/run.sh --on-threads    tries all of it where no GPU is (the figures say nothing and are not kept)
#   bash benchmarks/gpu/run.sh --carry         on a machine that has them: puts fmt and googletest into build/carried,
#                                              for a machine without network and without them
#
# Needs nvcc 12.8 or newer, g++ 12, CMake 3.23 and Python 3.10; fmt and googletest from the system or from
# build/carried. Parts: build (always: what did not change takes a second) tests memcheck bench. Logs and what is done:
# build/gpu. Results: benchmarks/results, with the machine's name, and a copy in $OUT where that is set, of what there
# is when a part was cut off, too.
#
# Not racecheck, nor synccheck: they look at shared memory and at barriers, and the kernels have neither.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit
on_threads='' named='' parts=() folder=build/gpu
for word in "$@"; do
  case $word in
    --on-threads) on_threads=1 folder=build/gpu-on-threads ;;
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
# Streams that share a connection wait for each other, by default from the ninth on, and some tests hold one that others
# must pass. (The benchmark has what an engine has.)
case ${KV_OFFLOAD_GPU_PART:-} in tests | memcheck) export CUDA_DEVICE_MAX_CONNECTIONS=32 ;; esac
generator=() # Ninja where it is
command -v ninja >/dev/null && generator=(-G Ninja)

part_build() {
  cmake -S benchmarks/gpu -B "$folder/build" "${generator[@]}" -DKV_OFFLOAD_ON_THREADS="${on_threads:-OFF}" &&
    cmake --build "$folder/build" -j "${JOBS:-$(nproc)}"
}
part_tests() {
  [ -n "$on_threads" ] || nvidia-smi --query-gpu=name,driver_version,pcie.link.gen.current,pcie.link.width.current --format=csv
  [ -z "$on_threads" ] || export KV_OFFLOAD_GPU_SECONDS=1 KV_OFFLOAD_GPU_CASES=20
  has_run_one && "$folder/build/gpu_tests"
}
# A machine without a GPU has passed nothing. (Not into grep: it ends at the first line that it seeks, and the tests with
# it.)
has_run_one() {
  local one
  one=$("$folder/build/gpu_tests" --gtest_filter='*pinning_reports*') || { echo "$one"; return 1; }
  [[ $one == *"[       OK ]"* ]] || { echo "no test has run: there is no GPU that CUDA can use"; return 1; }
}
# Few cases: each kernel runs some ten times slower. What the runtime refuses is what some tests are about: it is left
# to them; here is what kernels do to memory.
part_memcheck() {
  if [ -n "$on_threads" ]; then
    echo "no compute-sanitizer on threads: the tests run as they are"
    KV_OFFLOAD_GPU_SECONDS=1 KV_OFFLOAD_GPU_CASES=5 "$folder/build/gpu_tests" --gtest_filter='*Paths*'
    return
  fi
  has_run_one && KV_OFFLOAD_GPU_SECONDS=5 KV_OFFLOAD_GPU_CASES=15 compute-sanitizer --tool memcheck \
    --report-api-errors no --error-exitcode 9 "$folder/build/gpu_tests" --gtest_filter='*Paths*:*random_jobs*:*refused*'
}
part_bench() { python3 benchmarks/copy_gpu.py --program "$folder/build/copy_gpu" ${on_threads:+--quick}; }

# 540 in all, on 16 cores and a PCIe 5 link; KV_OFFLOAD_GPU_SLOWER=3 gives each part three times as long.
slower=${KV_OFFLOAD_GPU_SLOWER:-1}
declare -A seconds=([build]=$((110 * slower)) [tests]=$((80 * slower)) [memcheck]=$((80 * slower)) [bench]=$((270 * slower)))
if [ "${KV_OFFLOAD_GPU_PART:-}" != "" ]; then
  "part_$KV_OFFLOAD_GPU_PART"
  exit
fi
failed=()
gpu=$([ -n "$on_threads" ] || nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null) # whose figures they are
run() { # part
  rm -f "$folder/$1.done"
  local begun=$SECONDS
  printf '==== %s\n' "$1"
  if KV_OFFLOAD_GPU_PART=$1 timeout --kill-after=5 "${seconds[$1]}" bash benchmarks/gpu/run.sh \
    ${on_threads:+--on-threads} 2>&1 | tee "$folder/$1.log" | tail -n "${KV_OFFLOAD_GPU_LINES:-60}"; then
    printf '%s' "$gpu" >"$folder/$1.done"
    printf '%s: done in %d s\n' "$1" $((SECONDS - begun))
  else
    failed+=("$1")
    printf '%s: FAILED after %d s; all of it is in %s\n' "$1" $((SECONDS - begun)) "$folder/$1.log"
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
    if [ -z "$named" ] && was_done "$part"; then echo "$part: was done"; else run "$part"; fi
  done
fi
if [ -n "${OUT:-}" ]; then
  cp "$folder"/*.log "$OUT"
  find benchmarks/results -name 'copy_gpu-*' -newer "$folder/begun" -exec cp {} "$OUT" \;
fi
[ ${#failed[@]} -eq 0 ] || { echo "FAILED: ${failed[*]}"; exit 1; }
