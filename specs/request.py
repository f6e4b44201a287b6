"""What a request may ask of us in its ``kv_transfer_params``."""

from dataclasses import dataclass
from typing import Any

from kv_offload.log import get_logger

logger = get_logger(__name__)

LOAD_POLICIES = ("auto", "always", "never")
_PRIORITIES = range(-(2**31), 2**31)


@dataclass(slots=True)
class RequestState:
    """Kept in the ReqContext, so that a request id that is used again is another request."""

    handle: int  # of TieredCache
    generation: int  # of the manager: how many resets it had seen


def request_hints(params: Any) -> dict[str, Any]:
    """Arguments for ``TieredCache.begin_request``; what cannot be meant is ignored with a warning.

    ``load_policy``: auto, always, never; ``kv_offload_skip_load``, ``kv_offload_skip_store``: bool;
    ``priority``: int, below 0: what the request stores goes first, above 0: last.
    """
    if not isinstance(params, dict):
        return {}
    hints: dict[str, Any] = {}
    policy = params.get("load_policy")
    if policy in LOAD_POLICIES:
        hints["load_policy"] = policy
    elif policy is not None:
        _ignored("load_policy", policy, "auto, always, never")
    if _flag(params, "kv_offload_skip_store"):
        hints["skip_store"] = True
    if _flag(params, "kv_offload_skip_load"):
        hints |= {"load_from_cpu": False, "load_from_tiers": False}
    priority = params.get("priority")
    if type(priority) is int and priority in _PRIORITIES:
        hints["priority"] = priority
    elif priority is not None:
        _ignored("priority", priority, "an integer of 32 bits")
    return hints


def _flag(params: dict[str, Any], name: str) -> bool:
    value = params.get(name)
    if value is not None and not isinstance(value, bool):
        _ignored(name, value, "true, false")
    return value is True


def _ignored(name: str, value: object, possible: str) -> None:
    logger.warning("kv_transfer_params: %s is %.80r and is ignored; possible: %s", name, value, possible)
