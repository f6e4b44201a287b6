# SPDX-License-Identifier: Apache-2.0
"""Limits how long the idle OpenMP threads of vLLM's CPU ranks spin.

vLLM loads GNU's OpenMP, whose threads spin for up to 3 ms before they sleep (GOMP_SPINCOUNT, 300,000 by
default: https://gcc.gnu.org/onlinedocs/libgomp/GOMP_005fSPINCOUNT.html). If ranks compute on all cores, a
spinning thread takes a core from vLLM's other processes and from the threads that read and write records. We
start such ranks with fewer spins. OpenMP reads the variable when it is loaded, so the rank's environment must
contain it from the start. We set it in the engine core, where vLLM sets up OpenMP for its ranks.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from kv_offload.log import get_logger
from kv_offload.names import SPEC_NAME

logger = get_logger(__name__)

SPINS = 1000  # about 10 us: longer than the gaps between parts of a layer
VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")  # the user's own setting of either one wins


def tune_ranks(managers: type) -> None:
    """Makes vLLM's ``OMPProcessManager`` set up ranks according to our configuration. Idempotent.

    Changes nothing for engines without our spec, or if vLLM's interface has changed.
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
        except Exception as error:  # vLLM's private interface has changed
            logger.warning("openmp_wait has no effect: %s: %s", type(error).__name__, error)

    init.tunes_ranks = True  # type: ignore[attr-defined]
    managers.__init__ = init  # type: ignore[misc]


def tune(manager: Any, config: Any) -> None:
    """Applies our setting to ``manager``. ``config``: the VllmConfig of that manager's engine."""
    if wanted(manager, config):
        manager.configure_omp_envs = with_fewer_spins(manager.configure_omp_envs)
        logger.info("idle OpenMP threads of the ranks sleep: openmp_wait, GOMP_SPINCOUNT=%d", SPINS)


def wanted(manager: Any, config: Any) -> bool:
    """True if the threads of this engine's ranks should sleep. ``manager``: its OMPProcessManager."""
    if any(name in os.environ for name in VARIABLES):
        return False
    how = requested_wait(config)
    if how == "spin" or manager.use_iomp:  # vLLM itself sets the variable of Intel's OpenMP
        return False
    return how == "sleep" or (how == "auto" and computes_on_all_cores(manager))


def requested_wait(config: Any) -> str:
    """Returns ``openmp_wait`` of the engine's configuration; "spin" for engines without our spec."""
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
    """True if the ranks of this engine compute on all cores that the process may use."""
    if manager.skip_setup:  # vLLM binds no threads here: the operator does, or they are unbound
        return "OMP_NUM_THREADS" not in os.environ
    return not os.sched_getaffinity(0).difference(*manager.cpu_lists)


def with_fewer_spins(configure: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps an OMPProcessManager's ``configure_omp_envs`` to add our variable to the environment."""

    @contextlib.contextmanager
    def configured(*args: Any, **kwargs: Any) -> Iterator[None]:
        with configure(*args, **kwargs):
            os.environ[VARIABLES[0]] = str(SPINS)
            try:
                yield
            finally:
                # It was not set before (see wanted()); other code may have removed it in the meantime.
                os.environ.pop(VARIABLES[0], None)

    return configured
