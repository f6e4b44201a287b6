"""The kind ``s3``: what is accepted, what is refused and in which words, and that no key is shown."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kv_offload import _core
from kv_offload.cli import app
from kv_offload.config import ConfigError, OffloadConfig
from kv_offload.machine import cautions
from kv_offload.tiers import parse_tier
from kv_offload.tiers.s3 import S3TierConfig
from kv_offload.tiers.s3_credentials import find_credentials

SECRET = "hunter2-never-shown"
ACCESS = "AKIA-never-shown"


@pytest.fixture(autouse=True)
def no_credentials_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The path of a file of credentials that is not there yet."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
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


def test_its_place_is_the_bucket_the_prefix_and_the_store() -> None:
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
def test_what_is_no_name_is_refused(key: str, value: str) -> None:
    assert f"secondary_tiers[0].{key}" in problem(**{key: value})


def test_what_does_not_belong_together_is_refused() -> None:
    assert "lifecycle rule" in problem(max_bytes="1GiB")
    assert "nothing would be verified" in problem(endpoint="http://h", ca_file="/ca.pem")
    assert "'secret_key' is not known, and credentials do not belong here" in problem(secret_key=SECRET)
    assert SECRET not in problem(secret_key=SECRET)


@pytest.mark.parametrize("text", [f"https://u:{SECRET}@h", f"https://{SECRET}@h:x"])
def test_credentials_in_the_endpoint_are_refused_and_not_repeated(text: str) -> None:
    assert SECRET not in problem(endpoint=text)
    with pytest.raises(ValueError, match="endpoint") as caught:
        parse_tier({"type": "s3", "bucket": "kv-cache", "endpoint": text})
    assert SECRET not in str(caught.value)


def test_a_token_with_a_line_end_makes_no_header_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_SESSION_TOKEN", "a\r\nx-evil: 1")
    (text,) = tier().problems()
    assert "line ends" in text
    assert "evil" not in text


def test_without_credentials_it_says_what_to_set() -> None:
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
        found.summary(),
    ]
    assert shown[2] == "<S3Bucket s3://kv-cache at http://127.0.0.1:9>"
    for secret in (SECRET, ACCESS):
        assert secret not in "".join(shown) + caplog.text


def test_a_tier_can_be_given_on_the_command_line() -> None:
    result = CliRunner().invoke(app, ["config", "--cpu", "1GiB", "--tier", "s3=kv-cache"])
    assert result.exit_code == 0, result.output
    assert '"type": "s3"' in result.stdout or '"type":"s3"' in result.stdout


def test_this_build_has_the_tier() -> None:
    assert _core.s3_is_built()
