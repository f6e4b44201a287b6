# SPDX-License-Identifier: Apache-2.0
"""The ``vllm.general_plugins`` entry point: makes ``spec_name: KVOffloadSpec`` known in every process."""

import contextlib

from kv_offload.names import SPEC_MODULE, SPEC_NAME


def register() -> None:
    """Registers the spec with vLLM's factory, and the setup of CPU ranks. Idempotent.

    Never raises and never checks the release: an unsupported vLLM must still serve its other specs. The first
    use of our spec checks the release (compat.py).
    """
    try:
        from vllm.v1.kv_offload.factory import OffloadingSpecFactory
    except ImportError:
        return  # no offloading specs in this vLLM at all
    with contextlib.suppress(ValueError, AttributeError, TypeError):  # registered, or another factory
        OffloadingSpecFactory.register_spec(SPEC_NAME, SPEC_MODULE, SPEC_NAME)
    try:
        from vllm.utils.ompmultiprocessing import OMPProcessManager
    except ImportError:
        return
    from .openmp_wait import tune_ranks

    tune_ranks(OMPProcessManager)
