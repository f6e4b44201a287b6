#!/usr/bin/env bash
# Everything that is to be learnt on a machine with a GPU, in at most nine minutes on 16 cores: builds the CUDA copier
# for that machine, runs its tests, holds the kernels under compute-sanitizer, and measures.
#
#   bash benchmarks/gpu/run.sh                 all parts; those that were done are not done again
#   bash benchmarks/gpu/run.sh tests bench     some parts, again
#   bash benchmarks/gpu/run.sh --on-threads    tries all of it where no GPU is (the figures say nothing and are not kept)
#   bash benchmarks/gpu/run.sh --carry         on a machine that has them: puts fmt and googletest into build/carried,
#                                              for a machine without network and without them
#
# Needs nvcc 12.8 or newer, g++ 12, CMake 3.22 and Python 3.10; fmt and googletest from the system or from
# build/carried. Parts: build tests memcheck racecheck bench. Logs and what is done: build/gpu. Results:
# benchmarks/results, with the machine's name, and a copy in $OUT where that is set.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
on_threads='' parts=() folder=build/gpu
for word in "$@"; do
  case $word in
    --on-threads) on_threads=1 folder=build/gpu-on-threads ;;
    --carry)
      mkdir -p build/carried/include &&
        cp -rL /usr/include/fmt build/carried/include/ && cp -rL /usr/src/googletest build/carried/ &&
        du -sh build/carried
      exit
      ;;
    build | tests | memcheck | racecheck | bench) parts+=("$word") ;;
    *) echo "no part '$word'; there are: build tests memcheck racecheck bench" >&2; exit 2 ;;
  esac
done
mkdir -p "$folder"
if [ ${#parts[@]} -eq 0 ]; then
  for part in build tests memcheck racecheck bench; do
    [ -e "$folder/$part.done" ] && echo "$part: was done" || parts+=("$part")
  done
fi
export PATH=$PATH:/usr/local/cuda/bin
generator=() # Ninja where it is
command -v ninja >/dev/null && generator=(-G Ninja)

part_build() {
  cmake -S benchmarks/gpu -B "$folder/build" "${generator[@]}" -DKV_OFFLOAD_ON_THREADS="${on_threads:-OFF}" &&
    cmake --build "$folder/build" -j "${JOBS:-$(nproc)}"
}
part_tests() {
  [ -n "$on_threads" ] || nvidia-smi --query-gpu=name,driver_version,pcie.link.gen.current,pcie.link.width.current --format=csv
  [ -z "$on_threads" ] || export KV_OFFLOAD_GPU_SECONDS=1 KV_OFFLOAD_GPU_CASES=20
  "$folder/build/gpu_tests" --gtest_brief=1 &&
    ! "$folder/build/gpu_tests" --gtest_filter='*pinning_reports*' | grep -q SKIPPED # a machine without a GPU has passed nothing
}
# Few cases: each kernel runs some ten times slower.
under_sanitizer() { # tool
  if [ -n "$on_threads" ]; then
    echo "no compute-sanitizer on threads: the tests run as they are"
    KV_OFFLOAD_GPU_SECONDS=1 KV_OFFLOAD_GPU_CASES=5 "$folder/build/gpu_tests" --gtest_filter='*Paths*' --gtest_brief=1
    return
  fi
  KV_OFFLOAD_GPU_SECONDS=5 KV_OFFLOAD_GPU_CASES=15 compute-sanitizer --tool "$1" --error-exitcode 9 \
    "$folder/build/gpu_tests" --gtest_filter='*Paths*:*random_jobs*:*refused*' --gtest_brief=1
}
part_memcheck() { under_sanitizer memcheck; }
part_racecheck() { under_sanitizer racecheck; }
part_bench() {
  python3 benchmarks/copy_gpu.py --program "$folder/build/copy_gpu" ${on_threads:+--quick} || return
  [ -n "$on_threads" ] || [ -z "${OUT:-}" ] || cp benchmarks/results/copy_gpu-* "$OUT"
}

declare -A seconds=([build]=110 [tests]=80 [memcheck]=80 [racecheck]=50 [bench]=220) # 540 in all
if [ "${KV_OFFLOAD_GPU_PART:-}" != "" ]; then
  "part_$KV_OFFLOAD_GPU_PART"
  exit
fi
failed=()
for part in "${parts[@]}"; do
  rm -f "$folder/$part.done"
  begun=$SECONDS
  printf '==== %s\n' "$part"
  if KV_OFFLOAD_GPU_PART=$part timeout --kill-after=5 "${seconds[$part]}" bash benchmarks/gpu/run.sh \
    ${on_threads:+--on-threads} 2>&1 | tee "$folder/$part.log" | tail -n "${KV_OFFLOAD_GPU_LINES:-60}"; then
    touch "$folder/$part.done"
    printf '%s: done in %d s\n' "$part" $((SECONDS - begun))
  else
    failed+=("$part")
    printf '%s: FAILED after %d s; all of it is in %s\n' "$part" $((SECONDS - begun)) "$folder/$part.log"
    [ "$part" != build ] || break
  fi
done
[ -z "${OUT:-}" ] || cp "$folder"/*.log "$OUT"
[ ${#failed[@]} -eq 0 ] || { echo "FAILED: ${failed[*]}"; exit 1; }
