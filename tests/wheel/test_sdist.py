# SPDX-License-Identifier: Apache-2.0
"""The contents of the source distribution and the build of release wheels."""

import json
import re
import shutil
import subprocess
import sys
import tarfile
from fnmatch import fnmatch
from pathlib import Path

import pytest
import tomllib

REPOSITORY = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
NOT_IN_IT = (".ci/*", "benchmarks/results/*")
LEFT_BEHIND = (
    ".venv/bin/x",
    ".cache/x",
    "build/cpp/x.o",
    "kv_offload/_core.so",
    "specs/__pycache__/x.pyc",
    "site/x",
)


def run(*command: str, **options) -> str:
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def tracked() -> set[str]:
    names = run("git", "ls-files", "-z", cwd=REPOSITORY).split("\0")
    found = {name for name in names if name and (REPOSITORY / name).is_file()}
    assert found, "this is not a git checkout: the expected content of an sdist is not known"
    return found


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    """Builds and unpacks an sdist from the tracked files and some build leftovers."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("sdist")
    for name in tracked():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPOSITORY / name, tree / name)
    for name in LEFT_BEHIND:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text("not for others")
    build = f"from scikit_build_core.build import build_sdist; build_sdist({str(out)!r})"
    run(sys.executable, "-c", build, cwd=tree)
    (packed,) = out.glob("vllm_kv_offload-*.tar.gz")
    with tarfile.open(packed) as archive:
        archive.extractall(out, filter="data")
    return out / packed.name.removesuffix(".tar.gz")


def test_the_sdist_contains_exactly_the_tracked_files(sdist):
    """It contains every tracked file, unchanged, and nothing else."""
    expected = {name for name in tracked() if not any(fnmatch(name, pattern) for pattern in NOT_IN_IT)}
    found = {path.relative_to(sdist).as_posix() for path in sdist.rglob("*") if path.is_file()}
    assert found - {"PKG-INFO"} == expected
    differ = [name for name in expected if (sdist / name).read_bytes() != (REPOSITORY / name).read_bytes()]
    assert differ == []


def test_the_sdist_can_be_configured_and_has_every_source(sdist, tmp_path):
    """Compiles nothing: the checkout's tests compile the same bytes (KV_OFFLOAD_WHEEL=release makes the wheel
    of test_wheel.py from an sdist). Downloads nothing: it uses libvalkey from tests/run.sh.
    """
    options = ["-DKV_OFFLOAD_CUDA=OFF", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"]
    options += [f"-DKV_OFFLOAD_LIBVALKEY={path}" for path in REPOSITORY.glob(".cache/libvalkey-*.tar.gz")]
    output = run("cmake", "-S", str(sdist), "-B", str(tmp_path), "-G", "Ninja", *options)
    assert "Downloading" not in output, "libvalkey is missing in .cache; run bash tests/run.sh lint"
    sources = {entry["file"] for entry in json.loads((tmp_path / "compile_commands.json").read_text())}
    compiled = {source for source in sources if not source.startswith(f"{tmp_path}/libvalkey-")}
    assert compiled < sources
    core = {str(path) for path in sdist.glob("csrc/**/*.cc")}
    apart = {path for path in core if re.search(r"/bindings/|/bind_|/copy/cuda_", path)}
    assert compiled == core - apart


def test_the_metadata_is_complete_for_a_package_page(sdist):
    text = (sdist / "PKG-INFO").read_text()
    header, _, description = text.partition("\n\n")
    for line in (
        "License-Expression: Apache-2.0",
        "License-File: LICENSE",
        "License-File: docs/third_party_licenses.txt",
        "Requires-Python: >=3.10",
        "Description-Content-Type: text/markdown",
    ):
        assert line in header.splitlines()
    assert description.startswith("# vllm-kv-offload")
    assert "Classifier: License ::" not in header  # replaced by the license expression


def test_releases_are_built_for_each_supported_python():
    named = [
        classifier.rpartition(" ")[2]
        for classifier in PROJECT["project"]["classifiers"]
        if classifier.startswith("Programming Language :: Python :: 3.")
    ]
    builds = run(
        sys.executable,
        "-m",
        "cibuildwheel",
        "--print-build-identifiers",
        "--platform",
        "linux",
        cwd=REPOSITORY,
    )
    assert builds.split() == [
        f"cp{version.replace('.', '')}-manylinux_x86_64"
        for version in sorted(named, key=lambda v: int(v[2:]))
    ]


def configured(sdist: Path, build: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = ["cmake", "-S", str(sdist), "-B", str(build), "-G", "Ninja", "-DKV_OFFLOAD_CUDA=OFF", *options]
    return subprocess.run(command, capture_output=True, text=True)


def test_an_isolated_build_has_pip_to_download_libvalkey():
    assert "pip" in PROJECT["build-system"]["requires"]


def test_a_build_that_requires_tls_fails_without_openssl(sdist, tmp_path):
    options = [f"-DKV_OFFLOAD_LIBVALKEY={path}" for path in REPOSITORY.glob(".cache/libvalkey-*.tar.gz")]
    options += ["-DCMAKE_DISABLE_FIND_PACKAGE_OpenSSL=ON"]
    refused = configured(sdist, tmp_path, *options, "-DKV_OFFLOAD_TLS=ON")
    assert refused.returncode != 0
    assert "KV_OFFLOAD_TLS=ON but OpenSSL" in refused.stderr
    assert (
        "the redis tier refuses rediss://"
        in configured(sdist, tmp_path, *options, "-DKV_OFFLOAD_TLS=AUTO").stdout
    )


def test_a_build_that_requires_s3_or_encryption_fails_without_openssl(sdist, tmp_path):
    options = [f"-DKV_OFFLOAD_LIBVALKEY={path}" for path in REPOSITORY.glob(".cache/libvalkey-*.tar.gz")]
    options += ["-DCMAKE_DISABLE_FIND_PACKAGE_OpenSSL=ON", "-DKV_OFFLOAD_TLS=AUTO"]
    refused = configured(sdist, tmp_path, *options, "-DKV_OFFLOAD_S3=ON")
    assert refused.returncode != 0
    assert "KV_OFFLOAD_S3=ON but OpenSSL" in refused.stderr
    without = configured(sdist, tmp_path, *options, "-DKV_OFFLOAD_S3=AUTO")
    assert "there is no s3 tier" in without.stdout
    assert "Without OpenSSL records cannot be encrypted" in without.stdout
    refused = configured(sdist, tmp_path, *options, "-DKV_OFFLOAD_ENCRYPTION=ON")
    assert refused.returncode != 0
    assert "KV_OFFLOAD_ENCRYPTION=ON but OpenSSL" in refused.stderr


def test_an_archive_that_is_not_libvalkey_is_refused_and_removed(sdist, tmp_path):
    pin = (sdist / "csrc/cmake/libvalkey.txt").read_text().splitlines()[-1]
    damaged = tmp_path / f"{pin.split()[0].replace('==', '-')}.tar.gz"
    damaged.write_text("a proxy's sign-in page")
    refused = configured(sdist, tmp_path)
    assert refused.returncode != 0
    assert "its SHA-256 is" in refused.stderr
    assert not damaged.exists()


def test_releases_are_built_with_the_cuda_copier_tls_and_s3_for_manylinux_2_28():
    settings = PROJECT["tool"]["cibuildwheel"]
    assert settings["config-settings"]["cmake.define.KV_OFFLOAD_CUDA"] == "ON"
    assert settings["config-settings"]["cmake.define.KV_OFFLOAD_TLS"] == "ON"
    assert settings["config-settings"]["cmake.define.KV_OFFLOAD_S3"] == "ON"
    assert settings["config-settings"]["cmake.define.KV_OFFLOAD_ENCRYPTION"] == "ON"
    assert "KV_OFFLOAD_S3=ON" in (REPOSITORY / ".ci/wheel").read_text()
    assert "openssl-devel" in settings["linux"]["before-all"]
    assert "manylinux2_28" in settings["linux"]["manylinux-x86_64-image"]
    in_ci = (REPOSITORY / ".ci/wheel").read_text()
    for library in ("libcuda.so*", "libtorch*.so*", "libc10*.so*"):
        assert f"--exclude '{library}'" in in_ci
        assert f"--exclude '{library}'" in settings["linux"]["repair-wheel-command"]
