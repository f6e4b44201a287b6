# SPDX-License-Identifier: Apache-2.0
"""The ``vllm.general_plugins`` entry point: makes ``spec_name: KVOffloadSpec`` known in every process."""

import contextlib

from kv_offload.names import SPEC_MODULE, SPEC_NAME


def register() -> None:
    """Register the spec with vLLM's factory, and what sets up ranks on CPU; idempotent.

    Never raises and never judges the release: a vLLM that we do not support must go on serving its other
    specs. Whether this one is supported is said when the spec is used (compat.py).
    """
    try:
        from vllm.v1.kv_offload.factory import OffloadingSpecFactory
    except ImportError:
        return  # no offloading specs in this vLLM at all
    with contextlib.suppress(ValueError, AttributeError, TypeError):  # already, or a factory of another shape
        OffloadingSpecFactory.register_spec(SPEC_NAME, SPEC_MODULE, SPEC_NAME)
    try:
        from vllm.utils.ompmultiprocessing import OMPProcessManager
    except ImportError:
        return
    from .openmp_wait import tune_ranks

    tune_ranks(OMPProcessManager)
