# SPDX-License-Identifier: Apache-2.0
"""The byte-exactness test: random requests through vLLM's real scheduler; every byte is checked."""
