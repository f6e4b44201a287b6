# SPDX-License-Identifier: Apache-2.0
"""Handles sleep and in-place weight updates of vLLM's Worker.

Sleep unmaps the KV cache. vLLM waits for the connector's jobs first, unless the engine runs in the caller's
process (VLLM_ENABLE_V1_MULTIPROCESSING=0), so each connector finishes its copies here. vLLM 0.33 notifies
connectors (unregister_kv_caches, which OffloadingConnector leaves empty). In older releases we wrap the
methods that unmap the cache.

With ``fixed_weights`` a cache reset keeps the cache, so weight updates of this engine are refused.
"""

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

from .worker import KVOffloadWorker

_WORKER_MODULE = "vllm.v1.worker.gpu_worker"  # every platform's Worker inherits from the one in this module
_UNMAPS = ("sleep", "discard")
_CHANGES_WEIGHTS = (
    "reload_weights",
    "init_weight_transfer_engine",
    "start_weight_update",
    "start_draft_weight_update",
    "update_weights",
    "reset_weights",
)

_LOADS_MODEL = "load_model"  # also the worker's first step, before there is a model

_fixed: set[str] = set()  # ids of engines whose weights may not change


def finish_copies(connector: Any) -> None:
    """Finishes every copy of our OffloadingConnector, including stores that wait for the next step."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata

    side = getattr(connector, "connector_worker", None)
    worker = getattr(side, "worker", None)
    if side is None or not isinstance(worker, KVOffloadWorker):
        return
    side.handle_preemptions(OffloadingConnectorMetadata(load_jobs={}, store_jobs={}))
    worker.finish()


def finish_copies_before_sleep() -> None:
    """Makes this process finish our copies before vLLM unmaps the KV cache. Idempotent."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

    if hasattr(OffloadingConnector, "unregister_kv_caches"):
        _call_before(OffloadingConnector, "unregister_kv_caches", _finish_copies_of)
        return
    worker_class = _worker_class()
    for name in _UNMAPS if worker_class is not None else ():
        _call_before(worker_class, name, _finish_all_copies)


def _finish_copies_of(name: str, connector: Any, **arguments: Any) -> None:
    finish_copies(connector)


def _finish_all_copies(name: str, worker: Any, **arguments: Any) -> None:
    from vllm.distributed.kv_transfer.kv_transfer_state import get_kv_transfer_group, has_kv_transfer_group

    if not has_kv_transfer_group():
        return
    connector = get_kv_transfer_group()
    for each in getattr(connector, "_connectors", [connector]):  # a MultiConnector's
        finish_copies(each)


def refuse_weight_updates(vllm_config: Any) -> None:
    """Makes vLLM's Worker refuse weight changes of this engine (``fixed_weights``).

    Raises ValueError if vLLM is configured to change the weights, or if we cannot intercept the changes.
    """
    if getattr(vllm_config, "weight_transfer_config", None) is not None:
        raise ValueError(
            "fixed_weights is set, but this server is set up to receive weights (weight_transfer_config): "
            "KV of the old weights would be served with the new ones; remove one of the two"
        )
    worker_class = _worker_class()
    engine_id = getattr(getattr(vllm_config, "kv_transfer_config", None), "engine_id", None)
    if engine_id is None or worker_class is None:
        raise ValueError(
            "fixed_weights is set, but weight updates cannot be refused here: vLLM's "
            + (
                "configuration is not known in this worker"
                if engine_id is None
                else f"{_WORKER_MODULE} is missing"
            )
            + "; remove fixed_weights"
        )
    _fixed.add(engine_id)
    for name in _CHANGES_WEIGHTS:
        if hasattr(worker_class, name):
            _call_before(worker_class, name, _refuse)
    _call_before(worker_class, "sleep", _refuse_to_drop_weights)
    if hasattr(worker_class, _LOADS_MODEL):
        _call_before(worker_class, _LOADS_MODEL, _refuse_to_load_again)


def _refuse(name: str, worker: Any, **arguments: Any) -> None:
    transfer = getattr(worker.vllm_config, "kv_transfer_config", None)
    if getattr(transfer, "engine_id", None) in _fixed:
        raise RuntimeError(
            f"{name} is refused: fixed_weights is set, so KV of the current weights would be served with new "
            "ones. Restart the server with the new weights, or without fixed_weights"
        )


def _refuse_to_drop_weights(name: str, worker: Any, level: int = 1, **arguments: Any) -> None:
    if level >= 2:  # drops the weights; the caller may then load different ones
        _refuse(f"sleep at level {level}", worker)


def _refuse_to_load_again(name: str, worker: Any, **arguments: Any) -> None:
    # The files may have changed since, or update_config() may have selected other ones.
    if getattr(getattr(worker, "model_runner", None), "model", None) is not None:
        _refuse(name, worker)


def _worker_class() -> Any | None:
    return getattr(sys.modules.get(_WORKER_MODULE), "Worker", None)


def _call_before(owner: Any, name: str, first: Callable[..., None]) -> None:
    """Wraps a method of a vLLM class to call ``first(name, self, **arguments)`` before it.

    Wraps each method only once per ``first``.
    """
    method = getattr(owner, name)
    before: frozenset[Any] = getattr(method, "kv_offload_calls", frozenset())
    if first in before:
        return
    parameters = inspect.signature(method)

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        itself, *rest = args
        given = parameters.bind(*args, **kwargs).arguments
        first(name, itself, **dict(list(given.items())[1:]))
        return method(itself, *rest, **kwargs)

    wrapped.kv_offload_calls = before | {first}  # type: ignore[attr-defined]
    setattr(owner, name, wrapped)
