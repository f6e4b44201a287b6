#!/usr/bin/env bash
# Sets up everything on a fresh Debian or Ubuntu with Python 3.11 and runs the demonstration:
#   bash examples/demo.sh [options of examples/demo.py]
# Makes .venv in the checkout (about 2 GB with vLLM for CPU) and installs missing Debian packages with apt-get.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash .ci/setup
exec .venv/bin/python examples/demo.py "$@"
