# SPDX-License-Identifier: Apache-2.0
"""The contract between vLLM and a manager, worker and spec, checked against vLLM's own base classes."""
