# SPDX-License-Identifier: Apache-2.0
"""A third-party type of tier: a class here, a line that registers it, and a C++ file
(tests/cpp/toy_tier/toy_tier.cc). Its server is a dictionary in this process.
"""

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from kv_offload.tiers.base import TierConfig
from kv_offload.tiers.registry import register

if TYPE_CHECKING:
    from kv_offload._core import TierSpec
    from kv_offload.namespace import NamespaceIdentity

BUILT = Path(__file__).resolve().parents[2] / "build" / "cpp"


def extension() -> ModuleType:
    """Returns the C++ part, from the build of the core that tests/run.sh makes."""
    name = "kv_offload_toy_tier"
    if name not in sys.modules:
        (path,) = BUILT.glob(f"{name}*.so")
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[name] = module
    return sys.modules[name]


class ToyTierConfig(TierConfig):
    """Records in a dictionary that outlives the engines of this process."""

    example: ClassVar[Mapping[str, Any]] = {"type": "toy", "server": "shelf"}
    place_key: ClassVar[str] = "server"
    default_locality: ClassVar[Literal["LOCAL", "REMOTE"]] = "REMOTE"

    type: Literal["toy"] = "toy"
    server: str = Field(min_length=1, description="the dictionary's name")

    def make_spec(self, name: str, bound: int | None, identity: "NamespaceIdentity") -> "TierSpec":
        spec: TierSpec = extension().ToyTier(
            server=self.server,
            namespace_id=identity.namespace_id(),
            name=name,
            n_read_threads=self.n_read_threads,
            n_write_threads=self.n_write_threads,
            op_timeout_ms=self.op_timeout_ms,
        )
        return spec


register(ToyTierConfig)
