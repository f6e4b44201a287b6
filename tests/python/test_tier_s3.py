# SPDX-License-Identifier: Apache-2.0
"""The kind ``s3``: accepted values, refused values with their errors; no key is shown."""

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from s3_server import ACCESS as KNOWN
from s3_server import BUCKET, READER, S3Server, free_ports
from s3_server import SECRET as KNOWN_SECRET
from typer.testing import CliRunner

from kv_offload import _core
from kv_offload.cli import app
from kv_offload.cli.doctor_checks import place, speed
from kv_offload.config import ConfigError, OffloadConfig
from kv_offload.machine import cautions
from kv_offload.tiers.registry import parse_tier
from kv_offload.tiers.s3.config import S3TierConfig
from kv_offload.tiers.s3.credentials import find_credentials

SECRET = "hunter2-never-shown"
ACCESS = "AKIA-never-shown"


@pytest.fixture(autouse=True)
def no_credentials_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Returns the path of a credentials file that does not exist yet."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    path = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return path


def config(**given: Any) -> OffloadConfig:
    tier = {"type": "s3", "bucket": "kv-cache", **given}
    return OffloadConfig.parse({"cpu_bytes_to_use": "1GiB", "secondary_tiers": [tier]})[0]


def tier(**given: Any) -> S3TierConfig:
    (found,) = config(**given).secondary_tiers
    assert isinstance(found, S3TierConfig)
    return found


def problem(**given: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        config(**given)
    (text,) = caught.value.problems
    return text


def test_the_place_of_an_s3_tier_is_bucket_prefix_and_store() -> None:
    assert tier().place == "kv-cache/kv_offload"
    assert tier(prefix="a/b", endpoint="http://[::1]:9000/").place == "kv-cache/a/b at http://[::1]:9000"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("bucket", text) for text in ("", "ab", "A-b", "a/b", "-ab", "a b")),
        *(("prefix", text) for text in ("", "/a", "a/", "a//b", "../a", "a/..", "a b", "a%20", "a?b")),
        *(
            ("endpoint", text)
            for text in ("host", "ftp://h", "http://", "http://h/x", "http://h?x", "http://h:x")
        ),
        ("region", "eu west"),
        ("profile", "a]b"),
    ],
)
def test_an_invalid_name_is_refused(key: str, value: str) -> None:
    assert f"secondary_tiers[0].{key}" in problem(**{key: value})


def test_invalid_or_conflicting_options_are_refused() -> None:
    assert "lifecycle rule" in problem(max_bytes="1GiB")
    assert "nothing would be verified" in problem(endpoint="http://h", ca_file="/ca.pem")
    for host in ("127.0.0.1", "[::1]:9000"):
        assert "endpoint is an IP address" in problem(endpoint=f"http://{host}", path_style=False)
    assert "'secret_key' is not known, and credentials do not belong here" in problem(secret_key=SECRET)
    assert SECRET not in problem(secret_key=SECRET)


@pytest.mark.parametrize("text", [f"https://u:{SECRET}@h", f"https://{SECRET}@h:x"])
def test_credentials_in_the_endpoint_are_refused_and_not_repeated(text: str) -> None:
    assert SECRET not in problem(endpoint=text)
    with pytest.raises(ValueError, match="endpoint") as caught:
        parse_tier({"type": "s3", "bucket": "kv-cache", "endpoint": text})
    assert SECRET not in str(caught.value)


def test_a_token_with_a_line_end_adds_no_header(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_SESSION_TOKEN", "a\r\nx-evil: 1")
    (text,) = tier().problems()
    assert "line breaks" in text
    assert "evil" not in text


def test_without_credentials_the_error_names_the_settings() -> None:
    (text,) = tier().problems()
    assert "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY are not set" in text


def test_nothing_shows_the_keys(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    parsed = config(endpoint="http://127.0.0.1:9")
    (found,) = parsed.secondary_tiers
    assert isinstance(found, S3TierConfig)
    shown = [
        repr(parsed),
        json.dumps(parsed.model_dump(mode="json")),
        repr(found._bucket(find_credentials(None))),
        repr(find_credentials(None)),
        str(found.problems()),
        str(cautions(parsed)),
        str(found.summary()),
    ]
    assert shown[2] == "<S3Bucket s3://kv-cache at http://127.0.0.1:9>"
    for secret in (SECRET, ACCESS):
        assert secret not in "".join(shown) + caplog.text


def test_a_tier_can_be_given_on_the_command_line() -> None:
    result = CliRunner().invoke(app, ["config", "--cpu", "1GiB", "--tier", "s3=kv-cache"])
    assert result.exit_code == 0, result.output
    assert '"type": "s3"' in result.stdout or '"type":"s3"' in result.stdout


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    running = S3Server(tmp_path_factory.mktemp("s3"))
    try:
        running.start()
        yield running
    finally:
        running.kill()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Returns tier options for a machine that is busy with other tests."""
    monkeypatch.setattr("kv_offload.tiers.s3.config._PROBE_SECONDS", 240.0)
    return {"op_timeout_ms": 240_000}


def with_keys(monkeypatch: pytest.MonkeyPatch, secret: str) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KNOWN)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)


def test_doctor_shows_the_latency_and_speed_of_the_store(
    monkeypatch: pytest.MonkeyPatch, server: S3Server, patient: dict[str, Any]
) -> None:
    with_keys(monkeypatch, KNOWN_SECRET)
    asked = tier(bucket=BUCKET, endpoint=server.endpoint, prefix="measured", **patient)
    looked, bound = place(asked)
    assert (bound.state, "grows without bound" in bound.text) == ("note", True)
    assert looked.state == "ok"
    assert re.fullmatch(
        r"region us-east-1, answers in [0-9.]+ ms, no TLS, libcurl [0-9.]+.* \(/.*libcurl.*\)", looked.text
    )
    measured, codec = speed(asked, 8 << 20)
    assert measured.state == "ok", measured.text
    assert codec.text.startswith("compress auto is ")
    assert measured.figures is not None
    assert measured.figures["write_bytes_per_second"] > 0
    assert measured.figures["read_bytes_per_second"] > 0
    assert "4 objects of 2.0 MiB on one connection" in measured.text
    assert server.names("measured") == [], "the measurement left objects"
    assert cautions(config(bucket=BUCKET, endpoint=server.endpoint, **patient)) == []


def test_doctor_repeats_no_key_of_a_store_that_refuses_it(
    monkeypatch: pytest.MonkeyPatch, server: S3Server, patient: dict[str, Any]
) -> None:
    with_keys(monkeypatch, SECRET)
    asked = tier(bucket=BUCKET, endpoint=server.endpoint, **patient)
    (looked,), (measured,) = place(asked), speed(asked, 1 << 20)
    assert looked.state == "refused", "refused also without a measurement"
    assert "refuses the signature" in looked.text
    assert measured.state == "refused"
    assert "refuses the signature" in measured.text
    assert SECRET not in looked.text + measured.text


def test_start_errors_are_found_without_a_measurement(
    monkeypatch: pytest.MonkeyPatch, server: S3Server, patient: dict[str, Any]
) -> None:
    with_keys(monkeypatch, KNOWN_SECRET)
    (missing,) = place(tier(bucket="no-such-bucket", endpoint=server.endpoint, **patient))
    assert (missing.state, "the bucket does not exist" in missing.text) == ("refused", True)
    address = f"s3://no-such-bucket?endpoint={server.endpoint}"
    assert CliRunner().invoke(app, ["doctor", "--no-measure", "--root", address]).exit_code == 1
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAUNKNOWN")
    (unknown,) = place(tier(bucket=BUCKET, endpoint=server.endpoint, **patient))
    assert (unknown.state, "access key" in unknown.text) == ("refused", True)


def test_a_store_is_configured_by_the_variables_of_the_aws_tools(
    monkeypatch: pytest.MonkeyPatch, server: S3Server, patient: dict[str, Any]
) -> None:
    with_keys(monkeypatch, KNOWN_SECRET)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
    monkeypatch.setenv("AWS_REGION", "US-WEST-04A")
    asked = tier(bucket=BUCKET, prefix="found", **patient)
    looked, _ = place(asked)
    assert looked.state == "ok", looked.text
    told = f"endpoint {server.endpoint} (AWS_ENDPOINT_URL), region US-WEST-04A (AWS_REGION), answers"
    assert looked.text.startswith(told)
    (measured, _) = speed(asked, 4 << 20)
    assert measured.state == "ok", "the signature must use the region as written"
    assert asked.place == f"{BUCKET}/found at {server.endpoint}"


@pytest.mark.parametrize(
    ("variables", "settings", "given", "endpoint", "region"),
    [
        ({}, "", {}, "", "us-east-1"),
        ({"AWS_REGION": "eu-a", "AWS_DEFAULT_REGION": "eu-b"}, "region = eu-c", {}, "", "eu-a"),
        ({"AWS_DEFAULT_REGION": "EU-B"}, "region = eu-c", {}, "", "eu-b"),
        ({}, "region = eu-c", {}, "", "eu-c"),
        ({"AWS_REGION": "eu-a"}, "", {"region": "US-WEST-04A"}, "", "us-west-04a"),
        ({}, "", {"region": "US-WEST-04A", "endpoint": "https://h"}, "https://h", "US-WEST-04A"),
        (
            {"AWS_ENDPOINT_URL_S3": "https://a", "AWS_ENDPOINT_URL": "https://b"},
            "",
            {},
            "https://a",
            "us-east-1",
        ),
        ({"AWS_ENDPOINT_URL": "https://b/"}, "endpoint_url = https://c", {}, "https://b", "us-east-1"),
        ({}, "endpoint_url = https://c", {}, "https://c", "us-east-1"),
        ({}, "services = x\n[services x]\ns3 =\n  endpoint_url = https://d", {}, "https://d", "us-east-1"),
        ({"AWS_ENDPOINT_URL": "https://b"}, "", {"endpoint": "https://h"}, "https://h", "us-east-1"),
        (
            {"AWS_ENDPOINT_URL": "https://b", "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "true"},
            "endpoint_url = https://c",
            {},
            "",
            "us-east-1",
        ),
    ],
)
def test_endpoint_and_region_follow_the_order_of_the_aws_tools(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    variables: dict[str, str],
    settings: str,
    given: dict[str, str],
    endpoint: str,
    region: str,
) -> None:
    with_keys(monkeypatch, SECRET)
    (tmp_path / "config").write_text(f"[default]\n{settings}\n")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    keys = find_credentials(None)
    asked: dict[str, Any] = {}
    monkeypatch.setattr(_core, "S3Bucket", lambda **told: asked.update(told))
    tier(**given)._bucket(keys)
    assert (asked["endpoint"], asked["region"]) == (endpoint, region)
    assert asked["path_style"] == bool(endpoint)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("AWS_ENDPOINT_URL_S3", f"https://u:{SECRET}@h"),
        ("AWS_ENDPOINT_URL", "h:1"),
        ("AWS_REGION", "eu west"),
    ],
)
def test_an_invalid_variable_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    with_keys(monkeypatch, SECRET)
    monkeypatch.setenv(name, value)
    (told,) = tier().problems()
    assert name in told
    assert SECRET not in told


@pytest.mark.parametrize(("write_policy", "state"), [("write_through", "refused"), ("read_only", "note")])
def test_doctor_reports_missing_write_permission(
    monkeypatch: pytest.MonkeyPatch,
    server: S3Server,
    patient: dict[str, Any],
    write_policy: str,
    state: str,
) -> None:
    with_keys(monkeypatch, KNOWN_SECRET)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", READER)
    asked = tier(bucket=BUCKET, endpoint=server.endpoint, write_policy=write_policy, **patient)
    (measured,) = speed(asked, 1 << 20)
    assert (measured.state, "access is denied" in measured.text) == (state, True)


def test_an_unreachable_server_is_a_caution_and_refused_by_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    with_keys(monkeypatch, SECRET)
    away = {"endpoint": f"http://127.0.0.1:{free_ports(1)[0]}"}
    (caution,) = cautions(config(**away))
    assert "is not used until it answers" in caution
    (measured,) = speed(tier(**away), 1 << 20)
    assert measured.state == "refused"


def test_a_process_without_libcurl_shows_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_keys(monkeypatch, SECRET)
    assert _core.s3_unavailable_reason() == ""
    assert tier().problems() == []
    without = {**os.environ, "KV_OFFLOAD_LIBCURL": "/nowhere/libcurl.so.4"}
    doctor = "from kv_offload.cli import main; main()"
    asked = [sys.executable, "-c", doctor, "doctor", "--no-measure", "--root", "s3=kv-cache"]
    done = subprocess.run(asked, env=without, capture_output=True, text=True)
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == 1, said
    assert "the s3 tier needs libcurl" in said, said
    assert "apt install libcurl4" in said, said
