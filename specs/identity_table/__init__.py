# SPDX-License-Identifier: Apache-2.0
"""The tables that decide which vLLM settings are part of the namespace, with a reason for each decision.

A setting counts if two of its values give pages with different layouts, or with values computed by another
function, from other inputs, or in another precision. A setting does not count if it only changes the order of
sums, the choice between equivalent kernels, a size, a place or a label.

The tables name every field of VllmConfig and every environment variable that vLLM reads, in all supported
releases; tests/python/contract/check_identity_table.py compares them with the installed release. A field in
no table counts, so a new release is safe before its settings have been reviewed.
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
