"""How OpenMP's threads of ranks on CPU wait: the environment in which vLLM's own manager starts a rank."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
from adapter import use_specs

use_specs()

from kv_offload.specs import openmp_wait, plugin  # noqa: E402
from kv_offload.specs.openmp_wait import SPINS, VARIABLES, asked_for, tune_ranks  # noqa: E402
from vllm import platforms  # noqa: E402
from vllm.utils import ompmultiprocessing  # noqa: E402

OURS = {"spec_name": plugin.SPEC_NAME, "spec_module_path": "kv_offload.specs", "cpu_bytes_to_use": "1GiB"}


class Platform:
    """Of vLLM: a CPU with four cores, all of which this process may use."""

    on_cpu = True

    def is_cpu(self) -> bool:
        return self.on_cpu


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> Platform:
    platform = Platform()
    monkeypatch.setattr(platforms, "current_platform", platform)
    monkeypatch.setattr(ompmultiprocessing, "current_platform", platform)
    monkeypatch.setattr(platform, "get_cpu_architecture", lambda: platforms.CpuArchEnum.X86, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    for name in (*VARIABLES, "LD_PRELOAD", "VLLM_CPU_NUM_OF_RESERVED_CPU"):
        monkeypatch.delenv(name, raising=False)
    return platform


@pytest.fixture
def managers() -> type:
    """vLLM's, and tuned."""
    own: Any = ompmultiprocessing.OMPProcessManager
    init = getattr(own.__init__, "__wrapped__", own.__init__)
    kind: type = type("Manager", (own,), {"__init__": lambda self, config: init(self, config)})
    tune_ranks(kind)
    return kind


def engine(
    extra: dict[str, Any] | None = OURS, ranks: int = 1, connector: str = "OffloadingConnector"
) -> Any:
    transfer = SimpleNamespace(kv_connector=connector, kv_connector_extra_config=extra)
    parallel = SimpleNamespace(local_world_size=ranks, data_parallel_rank_local=0, _api_process_count=1)
    return SimpleNamespace(parallel_config=parallel, kv_transfer_config=None if extra is None else transfer)


def spins_of_a_rank(managers: type, config: Any, rank: int = 0) -> str | None:
    with managers(config).configure_omp_envs(rank=rank, local_rank=rank):
        assert os.environ.get("OMP_NUM_THREADS") or os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
        found = os.environ.get(VARIABLES[0])
    assert VARIABLES[0] not in os.environ
    return found


@pytest.mark.parametrize(
    ("bound", "ranks", "how", "spins"),
    [
        ("0-3", 1, "auto", str(SPINS)),
        ("0-1|2-3", 2, "auto", str(SPINS)),
        ("nobind", 1, "auto", str(SPINS)),
        ("0-2", 1, "auto", None),
        ("0|2-3", 2, "auto", None),
        ("0-2", 1, "sleep", str(SPINS)),
        ("0-3", 1, "spin", None),
    ],
)
def test_threads_sleep_where_ranks_compute_on_all_cores(
    managers: type, monkeypatch: pytest.MonkeyPatch, bound: str, ranks: int, how: str, spins: str | None
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", bound)
    config = engine({**OURS, "openmp_wait": how}, ranks)
    for rank in range(ranks):
        assert spins_of_a_rank(managers, config, rank) == spins


@pytest.mark.parametrize("name", VARIABLES)
def test_what_the_environment_says_is_left(
    managers: type, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-3")
    monkeypatch.setenv(name, "7")
    with managers(engine()).configure_omp_envs(rank=0, local_rank=0):
        assert [os.environ.get(variable) for variable in VARIABLES] == [
            "7" if variable == name else None for variable in VARIABLES
        ]
    assert os.environ[name] == "7"


def test_engines_that_are_not_ours_are_left_alone(
    managers: type, monkeypatch: pytest.MonkeyPatch, machine: Platform
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-3")
    others = {"spec_name": "CPUOffloadingSpec", "cpu_bytes_to_use": 2**30}
    for config in (engine(None), engine(others), engine(OURS, connector="NixlConnector")):
        assert spins_of_a_rank(managers, config) is None
    child = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": OURS}
    several = engine({"connectors": [{"kv_connector": "NixlConnector"}, child]}, connector="MultiConnector")
    assert spins_of_a_rank(managers, several) == str(SPINS)
    machine.on_cpu = False
    with managers(engine()).configure_omp_envs(rank=0, local_rank=0):
        assert VARIABLES[0] not in os.environ


def test_a_vllm_that_has_changed_starts_its_ranks_as_ever(
    managers: type, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-3")
    monkeypatch.setattr(openmp_wait, "others_cores", lambda cores: cores.missing)
    assert spins_of_a_rank(managers, engine()) is None
    assert "openmp_wait does nothing" in caplog.text


def test_the_plugin_tunes_vllms_manager_once() -> None:
    plugin.register()
    tuned = ompmultiprocessing.OMPProcessManager.__init__
    assert hasattr(tuned, "__wrapped__")
    plugin.register()
    assert ompmultiprocessing.OMPProcessManager.__init__ is tuned


def test_the_setting_is_the_configurations_own() -> None:
    from kv_offload.config import OffloadConfig

    assert asked_for(engine()) == OffloadConfig.model_fields["openmp_wait"].default
