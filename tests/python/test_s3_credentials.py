"""kv_offload/tiers/s3_credentials.py: where keys come from, and how those that expire are renewed."""

import json
import logging
import os
import sys
import threading
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from kv_offload import _core
from kv_offload.namespace import NamespaceIdentity
from kv_offload.tiers import parse_tier, s3_credentials
from kv_offload.tiers.s3_credentials import Credentials, Found, NoCredentials, Renewal, find_credentials

SECRET = "hunter2-never-shown"


class Files:
    """The files of AWS's tools, in a directory of the test."""

    def __init__(self, directory: Path) -> None:
        self.credentials, self.config = directory / "credentials", directory / "config"
        self.program = directory / "gives"

    def write(self, profile: str, access: str, more: str = "") -> None:
        text = f"[{profile}]\naws_access_key_id = {access}\naws_secret_access_key = {SECRET}\n{more}\n"
        self.credentials.write_text(text)

    def give(self, access: str, minutes: int) -> None:
        """By a program that botocore runs, as roles are given by requests."""
        expires = datetime.now(timezone.utc) + timedelta(minutes=minutes)
        keys = {"AccessKeyId": access, "SecretAccessKey": SECRET, "SessionToken": "t"}
        answer = json.dumps({"Version": 1, "Expiration": expires.isoformat(), **keys})
        self.program.write_text(f"echo '{answer}'\n")
        self.config.write_text(f"[default]\ncredential_process = sh {self.program}\n")

    def refuse(self) -> None:
        """With a text that botocore makes that of its error."""
        self.program.write_text(f"echo {SECRET} >&2\nexit 1\n")


@pytest.fixture(autouse=True)
def files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Files:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    found = Files(tmp_path)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(found.credentials))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(found.config))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return found


class Renewer:
    """Of a bucket that is used as long as the test says."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.is_used = True
        self.changed = threading.Event()

    def set(self, access_key: str, secret_key: str, session_token: str = "") -> None:
        assert secret_key == SECRET
        self.keys.append(access_key)
        self.changed.set()


# ---- where they come from


def test_the_environment_is_first_then_the_file(monkeypatch: pytest.MonkeyPatch, files: Files) -> None:
    files.write("default", "of-file", "aws_session_token = of-file\n[other]")
    assert find_credentials(None).keys == Credentials("of-file", SECRET, "of-file")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of-environment")
    with pytest.raises(NoCredentials, match="set both"):
        find_credentials(None)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_SESSION_TOKEN", "token")
    assert find_credentials(None) == Found(Credentials("of-environment", SECRET, "token"))
    assert find_credentials("default").keys.access_key == "of-file", "a profile that is named is meant"
    for missing in ("missing", "other"):
        with pytest.raises(NoCredentials, match=f"no profile {missing}|botocore finds no credentials"):
            find_credentials(missing)


def test_a_profile_of_the_environment_is_heeded(monkeypatch: pytest.MonkeyPatch, files: Files) -> None:
    files.write("prod", "of-prod")
    monkeypatch.setenv("AWS_PROFILE", "prod")
    assert find_credentials(None).keys.access_key == "of-prod"


def test_what_is_no_file_of_credentials_is_not_repeated(files: Files) -> None:
    files.credentials.write_text(f"nonsense {SECRET}")
    with pytest.raises(NoCredentials, match="cannot be read as a file") as caught:
        find_credentials("default")
    assert SECRET not in str(caught.value)


def test_botocore_gives_the_rest_where_it_is_installed(monkeypatch: pytest.MonkeyPatch, files: Files) -> None:
    files.give("of-a-role", minutes=60)
    found = find_credentials(None)
    assert found.keys == Credentials("of-a-role", SECRET, "t")
    assert found.source is not None
    files.refuse()
    with pytest.raises(NoCredentials, match=r"botocore finds no credentials \(\w+\)") as caught:
        find_credentials(None)
    assert SECRET not in str(caught.value)
    monkeypatch.setitem(sys.modules, "botocore.session", None)
    with pytest.raises(NoCredentials, match="there is no profile default"):
        find_credentials(None)


# ---- how they are renewed


def test_a_file_that_changes_is_read_again_and_one_that_is_gone_keeps_the_keys(
    files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    files.write("default", "first")
    renewer = Renewer()
    renewal = Renewal(find_credentials(None), renewer, "s3 bucket")
    assert renewal.look()
    assert renewer.keys == []
    files.credentials.unlink()
    assert renewal.look()
    assert renewal.look()
    files.write("default", "second")
    assert renewal.look()
    assert renewal.look()
    files.credentials.write_text(f"nonsense {SECRET}")
    assert renewal.look()
    assert renewer.keys == ["second"]
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [("is gone" in text, "cannot be read" in text) for text in warnings] == [
        (True, False),
        (False, True),
    ]
    assert SECRET not in caplog.text
    renewer.is_used = False
    assert not renewal.look()


def test_keys_of_a_role_that_soon_expire_are_renewed_by_botocore(
    files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    files.give("first", minutes=12)  # botocore asks from 15 minutes before
    renewer = Renewer()
    renewal = Renewal(find_credentials(None), renewer, "s3 bucket")
    files.give("second", minutes=5)
    assert renewal.look()
    assert renewer.keys == ["second"]
    files.refuse()
    assert renewal.look()
    assert renewer.keys == ["second"]
    ours = "".join(record.getMessage() for record in caplog.records if record.name.startswith("vllm"))
    assert "s3 bucket: credentials cannot be renewed (CredentialRetrievalError)" in ours
    assert SECRET not in ours
    files.give("third", minutes=60)
    assert renewal.look()
    assert renewer.keys == ["second", "third"]


def test_keys_that_stay_need_no_thread() -> None:
    before = threading.active_count()
    Renewal(Found(Credentials("a", SECRET)), Renewer(), "s3 bucket").start()
    assert threading.active_count() == before


def test_the_thread_ends_with_what_used_the_bucket(monkeypatch: pytest.MonkeyPatch, files: Files) -> None:
    monkeypatch.setattr(s3_credentials, "RENEW_SECONDS", 0.0)
    files.write("default", "first")
    renewer = Renewer()
    Renewal(find_credentials(None), renewer, "s3 bucket").start()
    (thread,) = [each for each in threading.enumerate() if each.name == "kv-offload-s3-keys"]
    assert thread.daemon
    files.write("default", "second")
    assert renewer.changed.wait(60)
    renewer.is_used = False
    thread.join(60)
    assert not thread.is_alive()


def test_a_tier_renews_the_keys_of_its_bucket_and_of_no_longer_than_it_lives(
    monkeypatch: pytest.MonkeyPatch, files: Files
) -> None:
    files.write("default", "first")
    begun: list[tuple[Found, _core.S3Renewer]] = []

    class Seen(Renewal):
        def __init__(self, found: Found, renewer: _core.S3Renewer, label: str) -> None:
            begun.append((found, renewer))
            super().__init__(found, renewer, label)

        def start(self) -> None:
            """Not here."""

    monkeypatch.setattr("kv_offload.tiers.s3.Renewal", Seen)
    tier = parse_tier({"type": "s3", "bucket": "kv-cache"})
    spec = tier.make_spec("s3", None, NamespaceIdentity({}, "bfloat16", "NHD", (), 1, 16, "sha256", "00"))
    ((found, renewer),) = begun
    assert found.keys.access_key == "first"
    assert renewer.is_used
    del spec
    assert not renewer.is_used
    renewer.set("nobody", "uses it")
