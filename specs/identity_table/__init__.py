# SPDX-License-Identifier: Apache-2.0
"""The vLLM settings that are part of the namespace, and the reason why each of the others is not.

A setting counts if two of its values give pages that are laid out differently, or that hold values computed
by another function, from other inputs, or in another precision. A setting does not count if it only changes
the order of sums, the choice between equivalent kernels, a size, a place or a label.

The tables name every field of VllmConfig and every environment variable that vLLM reads, in all supported
releases; tests/python/contract/check_identity_table.py compares them with the installed release. A field that
no table names counts: a new release is safe before anybody has read it.
"""

from .cache import CACHE
from .decision import Decision
from .engine import ENGINE
from .environment import VLLM_VARIABLES
from .environment_elsewhere import OTHER_VARIABLES
from .model import MODEL

CONFIGURATION: dict[str, Decision] = MODEL | CACHE | ENGINE
ENVIRONMENT: dict[str, Decision] = VLLM_VARIABLES | OTHER_VARIABLES

__all__ = ["CONFIGURATION", "ENVIRONMENT", "VLLM_VARIABLES", "Decision"]
