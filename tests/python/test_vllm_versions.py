# SPDX-License-Identifier: Apache-2.0
"""The supported releases of vLLM: every list of them is the same."""

import re

import pytest
from vllm_trees import ROOT

from kv_offload.vllm_versions import RELEASES, SUPPORTED, version_problem

FILES = [
    *(ROOT / name for name in ("tests/run.sh", "tests/ATTACKS.md")),
    *(file for folder in (".", "docs", "specs") for file in sorted((ROOT / folder).glob("*.md"))),
    *sorted((ROOT / "docs").glob("*/*.md")),
    *sorted((ROOT / "kv_offload").rglob("*.py")),
    *sorted((ROOT / "specs").glob("*.py")),
]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_list_of_releases_is_the_same(path):
    text = path.read_text()
    for found in re.findall(r"0\.\d+, (?:0\.\d+, )*0\.\d+ and 0\.\d+", text):
        assert found == SUPPORTED
    for found in re.findall(r"0\.3\d to 0\.3\d", text):
        assert found == f"{RELEASES[0]} to {RELEASES[-1]}"


def test_the_readme_names_the_releases():
    assert f"Works with vLLM {SUPPORTED}," in (ROOT / "README.md").read_text()


def test_the_tests_fetch_each_release_once():
    text = (ROOT / "tests" / "run.sh").read_text()
    fetched = re.findall(r"(?:vllm_version=|unpack_vllm \S+==)(0\.\d+)\.\d+", text)
    assert sorted(fetched) == sorted(RELEASES)
    assert set(re.findall(r" vllm-(0\.\d+)\b", text)) < set(RELEASES)


@pytest.mark.parametrize("name", ["examples/demo.sh", "examples/kubernetes/base/vllm.yaml"])
def test_examples_use_a_supported_release(name):
    found = re.findall(r"vllm[-/\w]*(?:==|:v)(0\.\d+)\.\d+", (ROOT / name).read_text())
    assert found
    assert set(found) <= set(RELEASES)


def test_earlier_and_later_releases_are_refused():
    first, last = (int(release.split(".")[1]) for release in (RELEASES[0], RELEASES[-1]))
    assert [version_problem(f"0.{minor}.0", {}) is None for minor in range(first - 1, last + 2)] == [
        False,
        *([True] * len(RELEASES)),
        False,
    ]


@pytest.mark.parametrize(
    ("version", "allowed"),
    [
        (f"{RELEASES[-1]}.1", True),
        (f"{RELEASES[-1]}.0+cu130", True),
        (f"{RELEASES[-1]}.1rc1", True),
        (f"{RELEASES[-1]}.1.dev12+gabc", False),
        (f"{RELEASES[-1]}.1rc1.dev7+gabc", False),
    ],
)
def test_a_development_version_is_not_the_release_before_it(version, allowed):
    assert (version_problem(version, {}) is None) == allowed
    assert version_problem(version, {"KV_OFFLOAD_ALLOW_UNTESTED_VLLM": "1"}) is None
