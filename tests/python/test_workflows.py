# SPDX-License-Identifier: Apache-2.0
""".github/workflows: their scripts exist, no stage is left out, and their permissions are minimal.

Also the hooks of .pre-commit-config.yaml and the presets of CMakePresets.json, which repeat settings of other
files.
"""

import json
import re
from pathlib import Path

import pytest
import tomllib
import yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = {
    path.name: yaml.safe_load(path.read_text()) for path in (ROOT / ".github/workflows").glob("*.yml")
}
RUN_SH = (ROOT / "tests/run.sh").read_text()
ALL = re.search(r'(?m)^all="(.*)"$', RUN_SH).group(1).split()
TESTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["test"]


def stages_of(workflow):
    """Yields the stages that a workflow passes to check.yml, with its matrix filled in."""
    found = []
    for job in workflow["jobs"].values():
        if job.get("uses") != "./.github/workflows/check.yml":
            continue
        given = job["with"]["stages"]
        matrix = job.get("strategy", {}).get("matrix", {}).get("include", [])
        rows = [row["stages"] for row in matrix] if given == "${{ matrix.stages }}" else [given]
        found += [stage for row in rows for stage in row.split()]
    return found


def steps(workflow):
    return [step for job in workflow["jobs"].values() for step in job.get("steps", [])]


def test_ci_runs_each_stage_once_except_the_mutants():
    assert sorted(stages_of(WORKFLOWS["ci.yml"])) == sorted(set(ALL) - {"mutants"})


def test_nightly_runs_each_stage_once():
    assert sorted(stages_of(WORKFLOWS["nightly.yml"])) == sorted(ALL)


def test_nightly_runs_every_part_of_the_mutants():
    job = WORKFLOWS["nightly.yml"]["jobs"]["mutants"]
    parts = job["strategy"]["matrix"]["part"]
    assert parts == list(range(1, len(parts) + 1))
    assert job["with"]["mutants-part"] == f"${{{{ matrix.part }}}}/{len(parts)}"


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_stage_named_in_a_command_exists(name):
    commands = [step["run"] for step in steps(WORKFLOWS[name]) if "run" in step]
    named = [
        word
        for text in commands
        for call in re.findall(r"tests/run\.sh ([^\n]*)", text)
        for word in call.split()
    ]
    assert set(named) <= {*ALL, "$LONG", "$STAGES"}


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_script_that_a_workflow_names_exists(name):
    commands = "\n".join(step.get("run", "") for step in steps(WORKFLOWS[name]))
    for script in re.findall(r"\bbash ([\w./]+)", commands):
        assert (ROOT / script).is_file(), script
    for job in WORKFLOWS[name]["jobs"].values():
        if "uses" in job:
            assert (ROOT / job["uses"]).is_file(), job["uses"]


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_has_read_permission_only_and_a_timeout(name):
    workflow = WORKFLOWS[name]
    assert workflow["permissions"] == {"contents": "read"}
    assert "secrets." not in (ROOT / ".github/workflows" / name).read_text()
    called = "workflow_call" in workflow[True]  # YAML 1.1 reads "on" as a boolean
    assert called or "concurrency" in workflow
    for job in workflow["jobs"].values():
        assert "uses" in job or "timeout-minutes" in job
        if "permissions" in job:
            assert set(job["permissions"]) <= {"pages", "id-token"}
    for step in steps(workflow):
        if "uses" in step:
            assert re.fullmatch(r"actions/[\w/-]+@v\d+", step["uses"]), step["uses"]


def test_pre_commit_hooks_have_the_versions_of_the_lint_stage():
    hooks = [
        hook
        for repo in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
        for hook in repo["hooks"]
    ]
    pins = {pin for hook in hooks for pin in hook.get("additional_dependencies", [])}
    assert [pin for pin in pins if pin.startswith("ruff")] == [pin for pin in TESTS if pin.startswith("ruff")]
    entries = " ".join(hook["entry"] for hook in hooks)
    for command in ("clang-format", "ruff check", "ruff format", "tests/mutants/run.py --list", "mypy"):
        assert command in entries
        assert command in RUN_SH


PRESETS = {
    preset["name"]: preset
    for preset in json.loads((ROOT / "CMakePresets.json").read_text())["configurePresets"]
}


def test_scripts_build_presets_that_exist():
    named = re.findall(r"(?:^|\{) *build (\w+) ", RUN_SH, re.MULTILINE)
    assert set(named) == {"asan", "tsan", "fuzz", "cuda"}
    named += re.findall(r"cmake --preset (\w+)", (ROOT / "tests/loop.sh").read_text())
    assert set(named) <= {name for name, preset in PRESETS.items() if not preset.get("hidden")}


def test_the_release_preset_has_the_options_of_the_wheel_script():
    script = (ROOT / ".ci/wheel").read_text()
    options = dict(re.findall(r'-Ccmake\.define\.(\w+)="?(?:\$\{\w+:-)?(\w+)', script))
    assert {"KV_OFFLOAD_CUDA", "KV_OFFLOAD_S3", "KV_OFFLOAD_ENCRYPTION"} <= set(options)
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["scikit-build"]
    options |= settings["cmake"]["define"] | {"CMAKE_BUILD_TYPE": settings["cmake"]["build-type"]}
    assert PRESETS["release-wheel"]["cacheVariables"] == options | {"KV_OFFLOAD_PYTHON": "ON"}
