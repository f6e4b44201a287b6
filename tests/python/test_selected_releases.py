# SPDX-License-Identifier: Apache-2.0
"""The releases of vLLM that a run of pytest checks: conftest.pytest_collection_modifyitems."""

from types import SimpleNamespace

import pytest
from conftest import pytest_collection_modifyitems
from vllm_trees import MINORS, installed_minor

ORACLE, CONTRACT = "oracle/check_oracle.py", "contract"


def item(file, minor):
    marker = None if file is None else SimpleNamespace(args=(file,))
    return SimpleNamespace(
        get_closest_marker=lambda name: marker, callspec=SimpleNamespace(params={"minor": minor})
    )


ITEMS = {(file, minor): item(file, minor) for file in (ORACLE, CONTRACT, None) for minor in MINORS}


def selected(*named):
    """Returns what a run of ITEMS executes, after checking that the rest is reported as deselected."""
    items, left = list(ITEMS.values()), []
    hook = SimpleNamespace(pytest_deselected=lambda items: left.extend(items))
    pytest_collection_modifyitems(SimpleNamespace(args=list(named), hook=hook), items)
    found = {key for key, each in ITEMS.items() if each in items}
    assert {key for key, each in ITEMS.items() if each in left} == ITEMS.keys() - found
    return found


def test_under_other_releases_only_the_contract_is_checked(monkeypatch):
    monkeypatch.delenv("KV_OFFLOAD_RELEASES", raising=False)
    others = {(ORACLE, minor) for minor in MINORS if minor != installed_minor()}
    assert 0 < len(others) < len(MINORS)
    assert selected("tests/python") == ITEMS.keys() - others


def test_the_stage_of_all_releases_selects_every_check(monkeypatch):
    monkeypatch.setenv("KV_OFFLOAD_RELEASES", "all")
    assert selected("tests/python") == ITEMS.keys()


@pytest.mark.parametrize("minor", MINORS)
def test_a_check_that_is_named_runs_under_its_release(monkeypatch, minor):
    monkeypatch.delenv("KV_OFFLOAD_RELEASES", raising=False)
    assert (ORACLE, minor) in selected(f"tests/python/test_oracle.py::test_byte_exactness[{minor}]")
