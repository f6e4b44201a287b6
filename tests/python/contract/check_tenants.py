# SPDX-License-Identifier: Apache-2.0
"""Run by test_contract.py under each vLLM release: the tenant of a request, from vLLM to the core."""

from types import SimpleNamespace
from typing import Any

import adapter
import pytest

adapter.use_specs()

from kv_offload.specs import compat  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler  # noqa: E402

from contract.check_manager import Engine  # noqa: E402
from contract.parts import keys  # noqa: E402

TENANTS = {
    "acme": {"share": 40, "clients": ["web"]},
    "beta": {"share": 30, "cache_salts": ["pepper"]},
}


@pytest.fixture(autouse=True)
def _original(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "_create_req_context", scheduler._create_req_context)


def vllm_request(name: str, salt: str | None = None, params: Any = None) -> Any:
    return SimpleNamespace(request_id=name, kv_transfer_params=params, kv_hints=None, cache_salt=salt)


def named(client: str) -> dict[str, Any]:
    return {"kv_offload_hints": {"version": 1, "client": client}}


def test_a_request_is_charged_to_the_tenant_of_its_salt_or_client() -> None:
    engine = Engine(tenants=TENANTS)
    for number, (salt, params) in enumerate(
        [(None, None), (None, named("web")), ("pepper", None), ("pepper", named("web")), ("salt", None)]
    ):
        request = scheduler._create_req_context(vllm_request(f"r{number}", salt, params))
        engine.manager.on_new_request(request)
        engine.store(keys(number), request)
    stats = engine.manager._cache.tenant_stats()
    (chunk,) = {size // chunks for (_, size, _), chunks in zip(stats, (2, 1, 2), strict=True)}
    assert chunk > 0
    assert [name for name, _, _ in stats] == ["other", "acme", "beta"]
    assert [share for _, _, share in stats] == pytest.approx([0.3 * 2**20, 0.4 * 2**20, 0.3 * 2**20], abs=1)


def test_the_report_names_the_tenant() -> None:
    engine = Engine(tenants=TENANTS)
    engine.request("r", named("web"))
    assert engine.manager.report_of("r")["tenant"] == "acme"
    assert "tenant" not in reported_without_tenants()


def reported_without_tenants() -> dict[str, Any]:
    engine = Engine()
    engine.request("r", named("web"))
    report: dict[str, Any] = engine.manager.report_of("r")
    return report


def test_a_tenant_is_found_although_hints_are_ignored() -> None:
    engine = Engine(tenants=TENANTS, request_hints="ignore")
    engine.request("r", named("web"))
    assert engine.manager.report_of("r")["tenant"] == "acme"


def test_hints_without_a_client_are_limited_by_tenant() -> None:
    engine = Engine(tenants=TENANTS)
    hints = {"kv_offload_hints": {"version": 1, "session": "s", "actions": []}}
    clients = set()
    for salt in (None, "pepper"):
        request = scheduler._create_req_context(vllm_request(f"r{salt}", salt, hints))
        engine.manager.on_new_request(request)
        clients.add(request.get_state(type(engine.manager._live[request.req_id])).hints.client)
    assert len(clients) == 2


def test_nothing_is_wrapped_unless_a_tenant_has_salts() -> None:
    original = scheduler._create_req_context
    Engine(tenants={"acme": {"share": 40}})
    assert scheduler._create_req_context is original
    Engine(tenants=TENANTS)
    wrapped = scheduler._create_req_context
    assert wrapped is not original
    Engine(tenants=TENANTS)
    assert scheduler._create_req_context is wrapped


def test_a_connector_that_makes_contexts_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for other in (None, lambda: None, lambda request, more: None):
        monkeypatch.setattr(scheduler, "_create_req_context", other)
        with pytest.raises(ValueError, match="tenants: this vLLM has no way to pass the cache_salt"):
            compat.pass_cache_salts()
