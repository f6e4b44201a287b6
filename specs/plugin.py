# SPDX-License-Identifier: Apache-2.0
"""The ``vllm.general_plugins`` entry point: makes ``spec_name: KVOffloadSpec`` known in every process."""

import contextlib

from kv_offload.names import SPEC_MODULE, SPEC_NAME


def register() -> None:
    """Registers the spec with vLLM's factory, and the setup of CPU ranks. Idempotent.

    Never raises and does not check the release: an unsupported vLLM must keep serving its other specs. The
    check runs when the spec is used (compat.py).
    """
    try:
        from vllm.v1.kv_offload.factory import OffloadingSpecFactory
    except ImportError:
        return  # this vLLM has no offloading specs
    with contextlib.suppress(ValueError, AttributeError, TypeError):  # already registered, or unknown factory
        OffloadingSpecFactory.register_spec(SPEC_NAME, SPEC_MODULE, SPEC_NAME)
    try:
        from vllm.utils.ompmultiprocessing import OMPProcessManager
    except ImportError:
        return
    from .openmp_wait import tune_ranks

    tune_ranks(OMPProcessManager)
