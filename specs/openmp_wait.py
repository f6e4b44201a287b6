# SPDX-License-Identifier: Apache-2.0
"""How long the threads with which vLLM's ranks compute on CPU spin when they have no work.

vLLM loads GNU's OpenMP, whose threads spin for up to 3 ms before they sleep (GOMP_SPINCOUNT, 300,000 unless
set: https://gcc.gnu.org/onlinedocs/libgomp/GOMP_005fSPINCOUNT.html). Where ranks compute on all cores, a
thread that spins keeps a core from vLLM's other processes and from what reads and writes records. Ranks are
started with fewer spins there. OpenMP reads the variable when it is loaded, so it has to be in a rank's
environment from the start: it is put there where vLLM's engine core sets up OpenMP for its ranks.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from kv_offload.log import get_logger
from kv_offload.names import SPEC_NAME

logger = get_logger(__name__)

SPINS = 1000  # some 10 us: parts of a layer follow each other sooner
VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")  # whoever sets one of them has decided


def tune_ranks(managers: type) -> None:
    """Have vLLM's ``OMPProcessManager`` set up ranks as our configuration says; idempotent.

    Engines that are not served with our spec are left alone, and so are all if vLLM has changed.
    """
    own = managers.__init__  # type: ignore[misc]
    if hasattr(own, "tunes_ranks"):
        return

    @wraps(own)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        own(self, *args, **kwargs)
        try:
            from vllm.platforms import current_platform

            if current_platform.is_cpu():
                tune(self, *args, **kwargs)
        except Exception as error:  # of what vLLM keeps to itself
            logger.warning("openmp_wait does nothing: %s: %s", type(error).__name__, error)

    init.tunes_ranks = True  # type: ignore[attr-defined]
    managers.__init__ = init  # type: ignore[misc]


def tune(manager: Any, config: Any) -> None:
    """``config``: the VllmConfig that ``manager`` was made for."""
    if wanted(manager, config):
        manager.configure_omp_envs = with_fewer_spins(manager.configure_omp_envs)
        logger.info(
            "the threads of ranks sleep when they have no work: openmp_wait, GOMP_SPINCOUNT=%d", SPINS
        )


def wanted(manager: Any, config: Any) -> bool:
    """Whether the threads of this engine's ranks are to sleep; ``manager``: its OMPProcessManager."""
    if any(name in os.environ for name in VARIABLES):
        return False
    how = asked_for(config)
    if how == "spin" or manager.use_iomp:  # Intel's OpenMP has a variable of its own, which vLLM sets
        return False
    return how == "sleep" or (how == "auto" and computes_on_all_cores(manager))


def asked_for(config: Any) -> str:
    """``openmp_wait`` of the engine's configuration; "spin" where our spec does not serve."""
    from kv_offload.config_compat import own_extra_config

    transfer = config.kv_transfer_config
    if transfer is None:
        return "spin"
    extra, problems = own_extra_config(
        {
            "kv_connector": transfer.kv_connector,
            "kv_connector_extra_config": transfer.kv_connector_extra_config,
        }
    )
    if problems or extra.get("spec_name") != SPEC_NAME:
        return "spin"
    return str(extra.get("openmp_wait", "auto"))


def computes_on_all_cores(manager: Any) -> bool:
    """Whether the ranks of this one engine do, of those that it may use."""
    if manager.skip_setup:  # whoever runs vLLM binds threads, or nobody does
        return "OMP_NUM_THREADS" not in os.environ
    return not os.sched_getaffinity(0).difference(*manager.cpu_lists)


def with_fewer_spins(configure: Callable[..., Any]) -> Callable[..., Any]:
    """``configure_omp_envs`` of an OMPProcessManager, with our variable in the environment that it makes."""

    @contextlib.contextmanager
    def configured(*args: Any, **kwargs: Any) -> Iterator[None]:
        with configure(*args, **kwargs):
            os.environ[VARIABLES[0]] = str(SPINS)
            try:
                yield
            finally:
                # It was not set before (wanted()), and others may have removed it meanwhile.
                os.environ.pop(VARIABLES[0], None)

    return configured
