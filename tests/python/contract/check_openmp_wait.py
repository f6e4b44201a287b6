# SPDX-License-Identifier: Apache-2.0
"""The wait of OpenMP threads in CPU ranks: the environment in which vLLM's own manager starts a rank."""

import contextlib
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from adapter import use_specs

use_specs()

from kv_offload.specs import openmp_wait, plugin  # noqa: E402
from kv_offload.specs.openmp_wait import SPINS, VARIABLES, requested_wait, tune_ranks  # noqa: E402
from vllm import platforms  # noqa: E402
from vllm.utils import ompmultiprocessing  # noqa: E402

from kv_offload.names import SPEC_NAME  # noqa: E402

OURS = {"spec_name": SPEC_NAME, "spec_module_path": "kv_offload.specs", "cpu_bytes_to_use": "1GiB"}
FEW = str(SPINS)
SAID = "idle OpenMP threads of the ranks sleep"


class Platform:
    """vLLM's platform of an x86 CPU."""

    on_cpu = True

    def is_cpu(self) -> bool:
        return self.on_cpu

    def get_cpu_architecture(self) -> Any:
        return platforms.CpuArchEnum.X86


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> Platform:
    """A machine with four usable cores; ranks compute on all of them unless a test changes that."""
    platform = Platform()
    monkeypatch.setattr(platforms, "current_platform", platform)
    monkeypatch.setattr(ompmultiprocessing, "current_platform", platform)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    for name in (*VARIABLES, "LD_PRELOAD", "OMP_NUM_THREADS", "VLLM_CPU_NUM_OF_RESERVED_CPU"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-3")
    return platform


@pytest.fixture
def managers() -> type:
    """Returns vLLM's manager class, tuned."""
    own: Any = ompmultiprocessing.OMPProcessManager
    init = getattr(own.__init__, "__wrapped__", own.__init__)
    kind: type = type("Manager", (own,), {"__init__": lambda self, config: init(self, config)})
    tune_ranks(kind)
    return kind


def engine(
    extra: dict[str, Any] | None = OURS, ranks: int = 1, connector: str = "OffloadingConnector"
) -> Any:
    transfer = SimpleNamespace(kv_connector=connector, kv_connector_extra_config=extra)
    parallel = SimpleNamespace(
        local_world_size=ranks,
        data_parallel_rank_local=0,
        _api_process_count=1,
        assigned_physical_gpu_ids=None,
    )
    return SimpleNamespace(parallel_config=parallel, kv_transfer_config=None if extra is None else transfer)


@contextlib.contextmanager
def start_of_a_rank(managers: Any, config: Any, rank: int = 0) -> Iterator[None]:
    """Starts a rank; on exit the environment must be what it was before."""
    before = dict(os.environ)
    try:
        with managers(config).configure_omp_envs(rank=rank, local_rank=rank):
            yield
    finally:
        assert dict(os.environ) == before


def spins_of_a_rank(managers: type, config: Any, rank: int = 0) -> str | None:
    with start_of_a_rank(managers, config, rank):
        return os.environ.get(VARIABLES[0])


@pytest.mark.parametrize(
    ("bound", "ranks", "how", "spins"),
    [
        ("0-3", 1, "auto", FEW),
        ("0-1|2-3", 2, "auto", FEW),
        ("0-2", 1, "auto", None),
        ("0|2-3", 2, "auto", None),
        ("0-2", 1, "sleep", FEW),
        ("0-3", 1, "spin", None),
        ("0-3", 1, "unknown", None),
    ],
)
def test_threads_sleep_where_ranks_compute_on_all_cores(
    managers: type, monkeypatch: pytest.MonkeyPatch, bound: str, ranks: int, how: str, spins: str | None
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", bound)
    config = engine({**OURS, "openmp_wait": how}, ranks)
    for rank, cores in enumerate(bound.split("|")):
        first, _, last = cores.partition("-")
        with start_of_a_rank(managers, config, rank):
            assert os.environ.get(VARIABLES[0]) == spins
            # set by vLLM itself
            assert os.environ["OMP_NUM_THREADS"] == str(int(last or first) - int(first) + 1)


def test_without_binding_there_is_a_thread_per_core_unless_configured(
    managers: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    assert spins_of_a_rank(managers, engine()) == FEW
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert spins_of_a_rank(managers, engine()) is None


def test_the_environment_is_restored_if_a_rank_fails_to_start(managers: type) -> None:
    def fails_to_start() -> None:
        with start_of_a_rank(managers, engine()):
            assert os.environ[VARIABLES[0]] == FEW
            raise OSError("no more processes")

    with pytest.raises(OSError, match="no more processes"):
        fails_to_start()


def test_a_variable_that_was_removed_meanwhile_is_not_an_error(managers: type) -> None:
    with start_of_a_rank(managers, engine()):
        del os.environ[VARIABLES[0]]
    assert VARIABLES[0] not in os.environ


@pytest.mark.parametrize("name", VARIABLES)
def test_settings_of_the_environment_are_kept(
    managers: type, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "7")
    with start_of_a_rank(managers, engine()):
        assert [os.environ.get(variable) for variable in VARIABLES] == [
            "7" if variable == name else None for variable in VARIABLES
        ]


def test_intel_openmp_keeps_vllms_settings(managers: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/libiomp5.so")
    with start_of_a_rank(managers, engine({**OURS, "openmp_wait": "sleep"})):
        assert os.environ["KMP_BLOCKTIME"] == "5"
        assert VARIABLES[0] not in os.environ


def test_engines_of_other_connectors_are_unchanged(managers: type) -> None:
    others = {"spec_name": "CPUOffloadingSpec", "cpu_bytes_to_use": 2**30}
    for config in (engine(None), engine(others), engine(OURS, connector="NixlConnector")):
        assert spins_of_a_rank(managers, config) is None
    child = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": OURS}
    several = engine({"connectors": [{"kv_connector": "NixlConnector"}, child]}, connector="MultiConnector")
    assert spins_of_a_rank(managers, several) == FEW


def test_gpu_ranks_are_unchanged(managers: type, machine: Platform, caplog: pytest.LogCaptureFixture) -> None:
    machine.on_cpu = False
    assert spins_of_a_rank(managers, engine({**OURS, "openmp_wait": "sleep"})) is None
    assert not caplog.text


def test_ranks_of_an_unknown_vllm_start_unchanged(caplog: pytest.LogCaptureFixture) -> None:
    class Manager:
        """The manager of another vLLM: other arguments, and none of the attributes that we use."""

        def __init__(self, config: Any, *, hosts: int) -> None:
            self.made = (config, hosts)

    class Without(Manager):
        skip_setup, use_iomp = True, False

        def __init__(self, config: Any) -> None:
            super().__init__(config, hosts=1)

    caplog.set_level("INFO")
    tune_ranks(Manager)
    tune_ranks(Without)
    assert Manager("config", hosts=2).made == ("config", 2)
    assert caplog.text.count("openmp_wait has no effect") == 1
    assert Without(engine()).made[1] == 1
    assert "configure_omp_envs" in caplog.text
    assert SAID not in caplog.text


def test_the_change_is_logged(managers: type, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert spins_of_a_rank(managers, engine()) == FEW
    assert SAID in caplog.text


def test_the_plugin_tunes_vllms_manager_once() -> None:
    plugin.register()
    tuned = ompmultiprocessing.OMPProcessManager.__init__
    assert tuned.tunes_ranks  # type: ignore[attr-defined]
    plugin.register()
    assert ompmultiprocessing.OMPProcessManager.__init__ is tuned


def test_the_setting_is_read_from_the_configuration() -> None:
    from kv_offload.config import OffloadConfig

    assert requested_wait(engine()) == OffloadConfig.model_fields["openmp_wait"].default
    assert openmp_wait.requested_wait(engine({**OURS, "openmp_wait": "sleep"})) == "sleep"
