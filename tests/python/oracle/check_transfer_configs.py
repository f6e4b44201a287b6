"""Run by test_transfer_configs.py under each vLLM release: doctor's verdict on the configurations of
data/transfer_configs.json, beside what vLLM's own parser and factories make of them."""

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
    """What --kv-transfer-config would get."""
    config = given(case)
    if vllm_verdict.is_transfer_config(config):
        return config
    both = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    return {**both, "kv_connector_extra_config": config}


@pytest.fixture(scope="module")
def verdicts() -> dict[str, list[Any]]:
    """By case: the states and texts of doctor's checks. vLLM is asked once, as that takes long."""
    asked: list[Any] = []
    answers: list[list[str]] = []

    def remember(transfer: Any, in_effect: Any) -> list[str]:
        asked.append([transfer, in_effect])
        return answers[len(asked) - 1] if answers else []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_verdict, "problems_of", remember)
        for case in CASES:
            judge(given(case), case.get("offloading_gib"))
        answers = vllm_verdict.ask_vllm(list(asked))
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
    """Whether vLLM, started with it, has made our spec. Raises what vLLM raises when it does not start."""
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
def test_doctor_says_what_the_table_says(case: dict[str, Any], verdicts: dict[str, list[Any]]) -> None:
    refused = [check.text for check in verdicts[case["name"]] if check.state == "refused"]
    said = [check.text for check in verdicts[case["name"]]]
    assert bool(refused) == (case["verdict"] == "refused"), said
    assert any(case["says"] in text for text in (refused or said or [""])), said


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_what_doctor_accepts_starts_and_what_it_refuses_does_not(
    case: dict[str, Any], verdicts: dict[str, list[Any]], vllm_config: Any
) -> None:
    accepted = all(check.state != "refused" for check in verdicts[case["name"]])
    if case["verdict"] == "partial":
        assert not serves(case, vllm_config), "a control: without the option there is no connector"
        assert serves({**case, "offloading_gib": 0.0625}, vllm_config)
        return
    if case.get("starts_in_parts"):  # vLLM asserts later, when the second one reports its metrics
        assert not accepted
        return
    try:
        started = serves(case, vllm_config)
    except Exception:
        started = False
    assert accepted == started


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_without_a_vllm_the_same_is_said_of_what_its_parser_reads(
    case: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_verdict, "find_spec", lambda _: None)
    if case.get("needs_vllm"):
        pytest.skip("a question that only vLLM can answer")
    checks = judge(given(case), case.get("offloading_gib")).checks
    assert any(check.state == "refused" for check in checks) == (case["verdict"] == "refused")


def test_the_words_that_are_known_here_are_those_of_vllm() -> None:
    fields = {field for field in KVTransferConfig.__dataclass_fields__}
    assert set(vllm_verdict.FIELDS) <= fields <= {*vllm_verdict.FIELDS, *vllm_verdict.FIELDS_OF_SOME}
    for key, words in (
        ("kv_role", vllm_verdict.ROLES),
        ("kv_load_failure_policy", vllm_verdict.FAILURE_POLICIES),
    ):
        for word in words:
            KVTransferConfig(**{"kv_connector": "X", "kv_role": "kv_both", key: word})
        with pytest.raises(ValueError, match=key):
            KVTransferConfig(**{"kv_connector": "X", "kv_role": "kv_both", key: "other"})
