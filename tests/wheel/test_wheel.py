# SPDX-License-Identifier: Apache-2.0
"""The wheel that .ci/wheel makes, in an environment without other parts of the project.

The tests check the contents of the wheel and the libraries that it finds, which do not depend on
optimisation. So the wheel is made of the objects of the developer build, which ccache has from earlier
stages. KV_OFFLOAD_WHEEL=release builds it from an sdist and optimised, as users get it, which compiles
everything again.
"""

import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import tomllib

REPOSITORY = Path(__file__).resolve().parents[2]
DEPENDENCIES = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["dependencies"]

pytestmark = pytest.mark.timeout(1200)


def run(*command: str | Path, **options) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def developer_build() -> dict[str, str]:
    """Returns settings for scikit-build-core; the flags must equal those of tests/run.sh exactly."""
    if os.environ.get("KV_OFFLOAD_WHEEL") == "release":
        return {}
    targets = ["_core", "kv_offload_torch"]
    if shutil.which("nvcc") is not None:
        targets += ["kv_offload_cuda", "kv_offload_torch_cuda"]
    return {
        "SKBUILD_CMAKE_BUILD_TYPE": "RelWithDebInfo",
        "CMAKE_ARGS": "-DKV_OFFLOAD_DEVELOPER=ON -DKV_OFFLOAD_UNITY=ON",
        "SKBUILD_BUILD_TARGETS": ";".join(targets),
        "SKBUILD_BUILD_DIR": "build/wheel",
        "SKBUILD_INSTALL_STRIP": "true",
        "CCACHE_BASEDIR": str(REPOSITORY),
        "CCACHE_NOHASHDIR": "1",
    }


@pytest.fixture(scope="session")
def wheel(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    environment = {**os.environ, **developer_build(), "PYTHON": sys.executable}
    if os.environ.get("KV_OFFLOAD_WHEEL") == "release":
        packed = tmp_path_factory.mktemp("sdist")
        build = f"from scikit_build_core.build import build_sdist; build_sdist({str(packed)!r})"
        run(sys.executable, "-c", build, cwd=REPOSITORY)
        (environment["SOURCE"],) = map(str, packed.iterdir())
    run(REPOSITORY / ".ci/wheel", out, env=environment)
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="session")
def empty_environment(wheel, tmp_path_factory) -> Path:
    """Creates a virtual environment, outside the checkout, with the wheel and its requirements."""
    root = tmp_path_factory.mktemp("empty")
    venv.create(root / "venv")
    # The outer pip installs there, so the environment holds only the wheel and its requirements.
    pip = [sys.executable, "-m", "pip", "--python", root / "venv/bin/python", "install", "-q", "--no-compile"]
    run(*pip, *DEPENDENCIES)
    run(*pip, "--no-deps", "--no-index", wheel)
    return root


def uv(*arguments: str | Path) -> str:
    return run(sys.executable, "-m", "uv", "-q", *arguments)


def installed_by_uv(root: Path, package: Path, *options: str) -> Path:
    """Creates a uv environment that holds ``package``, its requirements, and nothing else."""
    uv("venv", "--no-project", "--python", sys.executable, root / "venv")
    uv("pip", "install", "--python", root / "venv/bin/python", *options, package)
    return root


def python(environment: Path, code: str) -> str:
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "LD_LIBRARY_PATH")}
    return run(environment / "venv/bin/python", "-I", "-c", code, cwd=environment, env=clean).strip()


def test_the_wheel_contains_its_own_libraries(wheel):
    assert "linux_x86_64" not in wheel.name or "manylinux" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    assert any(name.startswith("vllm_kv_offload.libs/libfmt") for name in names)
    assert not any("libcurl" in name for name in names), "libcurl must be loaded from the machine"
    assert "kv_offload/_core.pyi" in names
    assert "kv_offload/py.typed" in names
    assert "kv_offload/specs/spec.py" in names
    assert not [name for name in names if name.startswith(("specs/", "tests/", "include/"))]


def test_the_wheel_imports_in_an_empty_environment(empty_environment):
    code = "import kv_offload, kv_offload._core as c; print(kv_offload.__version__, c.__version__)"
    package, core = python(empty_environment, code).split()
    assert package == core


def test_every_needed_library_is_found(empty_environment):
    where = python(empty_environment, "import kv_offload._core as c; print(c.__file__)")
    package = Path(where).parent
    libraries = [*package.glob("*.so*"), *(package.parent / "vllm_kv_offload.libs").glob("*.so*")]
    assert len(libraries) > 1
    for library in libraries:
        missing = [line.split()[0] for line in run("ldd", library).splitlines() if "not found" in line]
        # torch loads its own libraries, and torch is not installed here.
        allowed = ("libtorch", "libc10") if library.name.startswith("libkv_offload_torch") else ()
        assert [name for name in missing if not allowed or not name.startswith(allowed)] == [], library


def test_the_core_works_in_an_empty_environment(empty_environment):
    code = "import kv_offload._core as c; print(c.parse_byte_size('32GiB'), c.eviction_policy_names())"
    assert python(empty_environment, code).startswith("34359738368 ['lru'")


# Runs in the environment of the wheel, with the machine's libcurl and the wheel's OpenSSL.
S3_TIER = """
import kv_offload._core as c
bucket = c.S3Bucket(name="kv-cache", endpoint={endpoint!r}, path_style=True, ca_file={ca_file!r},
                    access_key={access!r}, secret_key={secret!r})
found = c.probe_s3(bucket, "wheel", 1 << 20, 2, 120.0)
print(found["records"], found["write_refused"] or "written", c.s3_library_version())
"""


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory):
    sys.path.insert(0, str(REPOSITORY / "tests/python"))
    try:
        import s3_server
    finally:
        sys.path.pop(0)
    directory = tmp_path_factory.mktemp("s3")
    running = s3_server.S3Server(directory, s3_server.certificate(directory))
    try:
        running.start()
        yield running
    finally:
        running.kill()


def test_the_wheel_has_the_s3_tier(empty_environment, s3_server):
    keys = {"access": "AKIAKVTESTS", "secret": "a-secret/of+tests"}
    for endpoint, ca_file in ((s3_server.endpoint, ""), (s3_server.secure, str(s3_server.tls))):
        code = S3_TIER.format(endpoint=endpoint, ca_file=ca_file, **keys)
        found = python(empty_environment, code)
        assert re.fullmatch(r"2 written [0-9.]+\S* \(/\S*libcurl\S*\)", found), found


def test_without_libcurl_the_reason_names_the_package(empty_environment):
    code = "import kv_offload._core as c; print(c.s3_unavailable_reason())"
    assert python(empty_environment, code) == ""
    missing = f"import os; os.environ['KV_OFFLOAD_LIBCURL'] = '/nowhere/libcurl.so.4'; {code}"
    reason = python(empty_environment, missing)
    assert "/nowhere/libcurl.so.4: cannot open shared object file" in reason
    assert "apt install libcurl4" in reason
    assert "dnf install libcurl" in reason


def test_the_wheel_has_the_command(empty_environment):
    assert "doctor" in run(empty_environment / "venv/bin/kv-offload", "--help", cwd=empty_environment)


IMPORTS = "import kv_offload, kv_offload._core as c; print(kv_offload.__version__ == c.__version__)"


def test_uv_installs_the_wheel_with_its_requirements(wheel, tmp_path):
    environment = installed_by_uv(tmp_path, wheel)
    assert python(environment, IMPORTS) == "True"
    assert "doctor" in run(environment / "venv/bin/kv-offload", "--help", cwd=environment)
    uv("pip", "check", "--python", environment / "venv/bin/python")


@pytest.mark.skipif(
    os.environ.get("KV_OFFLOAD_WHEEL") != "release", reason="compiles everything: KV_OFFLOAD_WHEEL=release"
)
def test_uv_builds_and_installs_the_sdist(tmp_path):
    build = f"from scikit_build_core.build import build_sdist; build_sdist({str(tmp_path)!r})"
    run(sys.executable, "-c", build, cwd=REPOSITORY)
    (packed,) = tmp_path.glob("*.tar.gz")
    environment = installed_by_uv(tmp_path, packed, "--config-setting=cmake.define.KV_OFFLOAD_CUDA=OFF")
    assert python(environment, IMPORTS) == "True"


def test_the_adapter_reports_that_vllm_is_missing(empty_environment):
    code = (
        "try:\n    from kv_offload.specs import KVOffloadSpec\nexcept ImportError as error:\n    print(error)"
    )
    assert "vllm" in python(empty_environment, code).lower()


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc here: the wheel has no CUDA copier")
def test_without_a_gpu_the_cuda_copier_reports_the_reason(wheel, empty_environment):
    assert "kv_offload/libkv_offload_cuda.so" in zipfile.ZipFile(wheel).namelist()
    assert python(empty_environment, "import kv_offload._core as c; print(c.cuda_unavailable_reason())")
