# SPDX-License-Identifier: Apache-2.0
"""Run by test_transfer_configs.py under each vLLM release: compares doctor's verdicts on the configurations
of data/transfer_configs.json with the results of vLLM's own parser and factories.
"""

import copy
import json
from pathlib import Path
from typing import Any

import adapter
import pytest

adapter.use_specs()

from kv_offload.specs import KVOffloadSpec, plugin  # noqa: E402
from pydantic import TypeAdapter  # noqa: E402
from vllm.config import KVTransferConfig, set_current_vllm_config  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole  # noqa: E402
from vllm.engine import arg_utils  # noqa: E402

from kv_offload import vllm_verdict  # noqa: E402
from kv_offload.cli.config_checks import judge  # noqa: E402
from oracle import engine  # noqa: E402

CASES = json.loads((Path(__file__).parents[1] / "data" / "transfer_configs.json").read_text(encoding="utf-8"))


def given(case: dict[str, Any]) -> dict[str, Any]:
    config = vllm_verdict.read_json(case.get("text") or json.dumps(case["config"]))
    return dict(config)


def whole(case: dict[str, Any]) -> dict[str, Any]:
    """Returns the value for --kv-transfer-config."""
    config = given(case)
    if vllm_verdict.is_transfer_config(config):
        return config
    both = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    return {**both, "kv_connector_extra_config": config}


@pytest.fixture(scope="module")
def verdicts() -> dict[str, list[Any]]:
    """Returns the states and texts of doctor's checks by case. vLLM is called once: it is slow."""
    asked: list[Any] = []
    answers: list[list[str]] = []

    def remember(transfer: Any, in_effect: Any) -> list[str]:
        asked.append([transfer, in_effect])
        return answers[len(asked) - 1] if answers else []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_verdict, "problems_of", remember)
        for case in CASES:
            judge(given(case), case.get("offloading_gib"))
        answers = vllm_verdict.judge_in_subprocess(list(asked))
        asked.clear()
        return {case["name"]: judge(given(case), case.get("offloading_gib")).checks for case in CASES}


@pytest.fixture(scope="module")
def vllm_config() -> Any:
    plugin.register()
    return engine._vllm_config(engine.Setup(), engine.make_model_dir(), "table")


def specs_of(connector: Any) -> list[Any]:
    children = getattr(connector, "_connectors", [connector])
    sides = [getattr(child, "connector_worker", None) for child in children]
    return [side.spec for side in sides if hasattr(side, "spec")]


def serves(case: dict[str, Any], vllm_config: Any) -> bool:
    """True if vLLM creates our spec with this configuration. Raises vLLM's error at a failed start."""
    text = case.get("text") or json.dumps(whole(case))
    parsed = TypeAdapter(KVTransferConfig).validate_json(arg_utils._expand_json_human_readable_numbers(text))
    config = copy.copy(vllm_config)
    config.cache_config = copy.copy(config.cache_config)
    config.kv_transfer_config = parsed
    config.cache_config.kv_offloading_size = case.get("offloading_gib")
    config._post_init_kv_transfer_config()
    if not parsed.is_kv_transfer_instance:
        return False
    with set_current_vllm_config(config):
        (layers,) = engine._kv_cache_configs(config, engine._specs_by_rank(engine.Setup()))
        layers.kv_cache_layout = "LBHNC"
        connector = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, layers)
    return any(isinstance(spec, KVOffloadSpec) for spec in specs_of(connector))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_doctor_gives_the_verdict_of_the_table(case: dict[str, Any], verdicts: dict[str, list[Any]]) -> None:
    refused = [check.text for check in verdicts[case["name"]] if check.state == "refused"]
    said = [check.text for check in verdicts[case["name"]]]
    assert bool(refused) == (case["verdict"] == "refused"), said
    assert any(case["says"] in text for text in (refused or said or [""])), said


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_doctor_accepts_exactly_the_configurations_that_start(
    case: dict[str, Any], verdicts: dict[str, list[Any]], vllm_config: Any
) -> None:
    accepted = all(check.state != "refused" for check in verdicts[case["name"]])
    if case["verdict"] == "partial":
        assert not serves(case, vllm_config), (
            "negative control: without the option there must be no connector"
        )
        assert serves({**case, "offloading_gib": 0.0625}, vllm_config)
        return
    if case.get("starts_in_parts"):  # vLLM asserts later, when the second connector reports its metrics
        assert not accepted
        return
    try:
        started = serves(case, vllm_config)
    except Exception:
        started = False
    assert accepted == started


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_without_vllm_doctor_gives_the_same_verdict_on_parsed_fields(
    case: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_verdict, "find_spec", lambda _: None)
    if case.get("needs_vllm"):
        pytest.skip("only vLLM can decide this case")
    checks = judge(given(case), case.get("offloading_gib")).checks
    assert any(check.state == "refused" for check in checks) == (case["verdict"] == "refused")


def test_the_known_values_match_vllms() -> None:
    fields = {field for field in KVTransferConfig.__dataclass_fields__}
    assert set(vllm_verdict.FIELDS) <= fields <= {*vllm_verdict.FIELDS, *vllm_verdict.REMOVED_FIELDS}
    for key, words in (
        ("kv_role", vllm_verdict.ROLES),
        ("kv_load_failure_policy", vllm_verdict.FAILURE_POLICIES),
    ):
        for word in words:
            KVTransferConfig(**{"kv_connector": "X", "kv_role": "kv_both", key: word})
        with pytest.raises(ValueError, match=key):
            KVTransferConfig(**{"kv_connector": "X", "kv_role": "kv_both", key: "other"})
