# SPDX-License-Identifier: Apache-2.0
"""kv_offload/tiers/s3/credentials.py: the sources of keys, and the renewal of temporary keys."""

import json
import logging
import os
import re
import sys
import threading
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from kv_offload import _core
from kv_offload.namespace import NamespaceIdentity
from kv_offload.tiers.registry import parse_tier
from kv_offload.tiers.s3 import credentials as s3_credentials
from kv_offload.tiers.s3.credentials import Credentials, Found, NoCredentials, Renewal, find_credentials

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
        """Provides temporary keys by a program that botocore runs."""
        expires = datetime.now(timezone.utc) + timedelta(minutes=minutes)
        keys = {"AccessKeyId": access, "SecretAccessKey": SECRET, "SessionToken": "t"}
        answer = json.dumps({"Version": 1, "Expiration": expires.isoformat(), **keys})
        self.program.write_text(f"echo '{answer}'\n")
        self.config.write_text(f"[default]\ncredential_process = sh {self.program}\n")

    def assume(self, service: str) -> None:
        """Configures a role from a service that is called with other keys."""
        self.write("base", "of-base")
        self.config.write_text(
            "[profile worker]\nrole_arn = arn:aws:iam::1:role/worker\nsource_profile = base\n"
            f"region = eu-west-1\nservices = here\n[services here]\nsts =\n  endpoint_url = {service}\n"
        )

    def refuse(self) -> None:
        """Makes the program fail with a text that botocore copies into its error."""
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


class Roles(ThreadingHTTPServer):
    """A service that assumes roles (AWS STS): returns the keys ``gives``, or an error with a secret."""

    daemon_threads = True

    def __init__(self) -> None:
        self.gives: list[str] = []  # access keys, one per reply
        self.asked: list[str] = []  # access key that signed each request
        super().__init__(("127.0.0.1", 0), _Answers)
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Answers(BaseHTTPRequestHandler):
    server: Roles

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append(re.findall("Credential=([^/]*)/", self.headers["Authorization"])[0])
        schema = 'xmlns="https://sts.amazonaws.com/doc/2011-06-15/"'
        if self.server.gives:
            expires = (datetime.now(timezone.utc) + timedelta(minutes=12)).isoformat()
            keys = f"<AccessKeyId>{self.server.gives.pop(0)}</AccessKeyId><SessionToken>t</SessionToken>"
            keys += f"<SecretAccessKey>{SECRET}</SecretAccessKey><Expiration>{expires}</Expiration>"
            text = f"<AssumeRoleResponse {schema}><AssumeRoleResult><Credentials>{keys}</Credentials>"
            text += "</AssumeRoleResult></AssumeRoleResponse>"
        else:
            text = f"<ErrorResponse {schema}><Error><Type>Sender</Type><Code>AccessDenied</Code>"
            text += f"<Message>{SECRET}</Message></Error></ErrorResponse>"
        self.send_response(200 if "Result" in text else 403)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Suppresses the request log."""


@pytest.fixture
def roles() -> Iterator[Roles]:
    serving = Roles()
    yield serving
    serving.shutdown()
    serving.server_close()


class Renewer:
    """The renewer of a bucket that is in use until the test ends it."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.is_used = True
        self.changed = threading.Event()

    def set(self, access_key: str, secret_key: str, session_token: str = "") -> None:
        assert secret_key == SECRET
        self.keys.append(access_key)
        self.changed.set()


# ---- sources of keys


def test_the_environment_precedes_the_file(monkeypatch: pytest.MonkeyPatch, files: Files) -> None:
    files.write("default", "of-file", "aws_session_token = of-file\n[other]")
    assert find_credentials(None).keys == Credentials("of-file", SECRET, "of-file")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of-environment")
    with pytest.raises(NoCredentials, match="set both"):
        find_credentials(None)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_SESSION_TOKEN", "token")
    assert find_credentials(None) == Found(Credentials("of-environment", SECRET, "token"))
    assert find_credentials("default").keys.access_key == "of-file", "a named profile takes precedence"
    for missing in ("missing", "other"):
        with pytest.raises(NoCredentials, match=f"no profile {missing}|profile {missing} has no keys"):
            find_credentials(missing)


def test_a_profile_from_the_environment_is_used(monkeypatch: pytest.MonkeyPatch, files: Files) -> None:
    files.write("prod", "of-prod")
    monkeypatch.setenv("AWS_PROFILE", "prod")
    assert find_credentials(None).keys.access_key == "of-prod"


def test_an_invalid_credentials_file_is_not_quoted(files: Files) -> None:
    files.credentials.write_text(f"nonsense {SECRET}")
    with pytest.raises(NoCredentials, match="cannot be read as a credentials file") as caught:
        find_credentials("default")
    assert SECRET not in str(caught.value)


def test_botocore_provides_the_other_sources_if_installed(
    monkeypatch: pytest.MonkeyPatch, files: Files
) -> None:
    files.give("of-a-role", minutes=60)
    found = find_credentials(None)
    assert found.keys == Credentials("of-a-role", SECRET, "t")
    assert found.source is not None
    files.refuse()
    with pytest.raises(
        NoCredentials, match=r"no credentials for profile default \(CredentialRetr\w+\)"
    ) as caught:
        find_credentials(None)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "setting",
    [
        "role_arn = a\nsource_profile = base",
        "credential_process = /bin/x",
        "sso_account_id = 1\nsso_session = s",
        "web_identity_token_file = /t",
        "credential_source = Ec2InstanceMetadata",
    ],
)
def test_without_botocore_the_error_names_the_source_of_the_profile(
    monkeypatch: pytest.MonkeyPatch, files: Files, setting: str
) -> None:
    monkeypatch.setitem(sys.modules, "botocore.session", None)
    files.config.write_text(f"[profile worker]\n{setting}\n")
    with pytest.raises(NoCredentials) as caught:
        find_credentials("worker")
    way = setting.split()[0]
    assert str(caught.value).endswith(
        f"gets its keys through {way}, which needs botocore: pip install botocore"
    )
    with pytest.raises(
        NoCredentials, match=r"profile default has no keys.*; instance and pod roles.*install botocore"
    ):
        find_credentials(None)


def test_a_role_precedes_keys_of_its_profile_and_a_program_follows_them(
    monkeypatch: pytest.MonkeyPatch, files: Files
) -> None:
    monkeypatch.setitem(sys.modules, "botocore.session", None)
    files.write("default", "static")
    files.config.write_text("[default]\ncredential_process = /bin/x\n")
    assert find_credentials(None).keys.access_key == "static"
    files.config.write_text("[default]\nrole_arn = a\nsource_profile = default\n")
    with pytest.raises(NoCredentials, match="through role_arn"):
        find_credentials(None)


def test_a_role_is_assumed_and_renewed_and_not_logged(
    files: Files, roles: Roles, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    files.assume(f"http://127.0.0.1:{roles.server_port}")
    roles.gives = ["first", "second"]
    found = find_credentials("worker")
    assert found.keys == Credentials("first", SECRET, "t")
    renewer = Renewer()
    renewal = Renewal(found, renewer, "s3 bucket")
    assert renewal.refresh()  # 12 minutes are left; botocore renews from 15 minutes before expiry
    assert renewer.keys == ["second"]
    assert renewal.refresh()
    assert roles.asked[:2] == ["of-base", "of-base"]
    assert len(roles.asked) > 2, "refused"
    assert SECRET not in caplog.text
    assert {record.name.partition(".")[0] for record in caplog.records} == {"vllm"}
    logging.getLogger("botocore.credentials").info("of others")
    assert "of others" in caplog.text


def test_a_refused_role_is_reported_by_its_error_code(files: Files, roles: Roles) -> None:
    files.assume(f"http://127.0.0.1:{roles.server_port}")
    with pytest.raises(NoCredentials) as caught:
        find_credentials("worker")
    assert str(caught.value) == "botocore finds no credentials for profile worker (ClientError AccessDenied)"


def test_an_expired_sso_session_is_reported_with_the_login_command(
    files: Files, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    files.config.write_text(
        "[profile worker]\nsso_session = s\nsso_account_id = 1\nsso_role_name = r\n"
        "[sso-session s]\nsso_start_url = https://s\nsso_region = eu-west-1\n"
    )
    with pytest.raises(NoCredentials, match=r"no valid sign-in.*aws sso login --profile worker"):
        find_credentials("worker")


def test_a_role_that_needs_mfa_is_refused_without_a_prompt(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("getpass.getpass", lambda *_: pytest.fail("asked for a code"))
    files.write("base", "of-base")
    role = "role_arn = arn:aws:iam::1:role/worker\nregion = eu-west-1\n"
    files.config.write_text(
        f"[profile worker]\n{role}source_profile = between\n"
        f"[profile between]\n{role}source_profile = base\nmfa_serial = arn:aws:iam::1:mfa/me\n"
        f"[profile circle]\n{role}source_profile = circle\n"
    )
    for profile in ("worker", "between"):
        with pytest.raises(NoCredentials, match=r"profile between has mfa_serial.*without"):
            find_credentials(profile)
    with pytest.raises(NoCredentials):
        find_credentials("circle")


@pytest.mark.parametrize("how", ["", "directory", "no access"])
def test_keys_are_found_if_the_other_file_is_invalid(
    files: Files, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: str
) -> None:
    files.write("default", "static")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path) if how == "directory" else "")
    if how == "no access":
        monkeypatch.setenv("AWS_CONFIG_FILE", str(files.credentials / "below-a-file"))
    assert find_credentials(None).keys.access_key == "static"


def test_an_invalid_settings_file_is_distinguished_from_a_credentials_file(files: Files) -> None:
    files.write("default", "static")
    files.config.write_text(f"nonsense {SECRET}")
    with pytest.raises(NoCredentials, match="config cannot be read as a settings file") as caught:
        find_credentials(None)
    assert SECRET not in str(caught.value)


def test_an_sso_session_without_a_role_keeps_the_keys(files: Files) -> None:
    files.write("default", "static")
    files.config.write_text("[default]\nsso_session = for-tokens\n")
    assert find_credentials(None).keys.access_key == "static"


def test_the_default_profile_may_be_written_like_the_others(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "botocore.session", None)
    files.write("default", "static")
    files.config.write_text("[default]\nregion = eu-west-1\n[profile default]\nrole_arn = a\n")
    with pytest.raises(NoCredentials, match="through role_arn"):
        find_credentials(None)


# ---- renewal


def test_a_changed_file_is_read_again_and_a_removed_one_keeps_the_keys(
    files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    files.write("default", "first")
    renewer = Renewer()
    renewal = Renewal(find_credentials(None), renewer, "s3 bucket")
    assert renewal.refresh()
    assert renewer.keys == []
    files.credentials.unlink()
    assert renewal.refresh()
    assert renewal.refresh()
    files.write("default", "second")
    assert renewal.refresh()
    assert renewal.refresh()
    files.credentials.write_text(f"nonsense {SECRET}")
    assert renewal.refresh()
    assert renewer.keys == ["second"]
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [("is missing" in text, "cannot be read" in text) for text in warnings] == [
        (True, False),
        (False, True),
    ]
    assert SECRET not in caplog.text
    renewer.is_used = False
    assert not renewal.refresh()


def test_keys_of_a_role_that_soon_expire_are_renewed_by_botocore(
    files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    files.give("first", minutes=12)  # botocore renews from 15 minutes before expiry
    renewer = Renewer()
    renewal = Renewal(find_credentials(None), renewer, "s3 bucket")
    files.give("second", minutes=5)
    assert renewal.refresh()
    assert renewer.keys == ["second"]
    files.refuse()
    assert renewal.refresh()
    assert renewer.keys == ["second"]
    assert "s3 bucket: credentials cannot be renewed (CredentialRetrievalError)" in caplog.text
    assert SECRET not in caplog.text
    assert {record.name.partition(".")[0] for record in caplog.records} == {"vllm"}
    files.give("third", minutes=60)
    assert renewal.refresh()
    assert renewer.keys == ["second", "third"]


def test_permanent_keys_need_no_thread() -> None:
    before = threading.active_count()
    Renewal(Found(Credentials("a", SECRET)), Renewer(), "s3 bucket").start()
    assert threading.active_count() == before


def test_the_thread_ends_with_the_last_user_of_the_bucket(
    monkeypatch: pytest.MonkeyPatch, files: Files
) -> None:
    monkeypatch.setattr(s3_credentials, "RENEW_SECONDS", 0.0)
    files.write("default", "first")
    renewer = Renewer()
    Renewal(find_credentials(None), renewer, "s3 bucket").start()
    (thread,) = [each for each in threading.enumerate() if each.name == "kv-offload-s3-keys"]
    assert thread.daemon
    files.write("default", "second")
    assert renewer.changed.wait(240)
    renewer.is_used = False
    thread.join(60)
    assert not thread.is_alive()


def test_a_tier_renews_the_keys_of_its_bucket_only_while_it_lives(
    monkeypatch: pytest.MonkeyPatch, files: Files
) -> None:
    files.write("default", "first")
    begun: list[tuple[Found, _core.S3Renewer]] = []

    class Seen(Renewal):
        def __init__(self, found: Found, renewer: _core.S3Renewer, label: str) -> None:
            begun.append((found, renewer))
            super().__init__(found, renewer, label)

        def start(self) -> None:
            """Starts no thread."""

    monkeypatch.setattr("kv_offload.tiers.s3.config.Renewal", Seen)
    tier = parse_tier({"type": "s3", "bucket": "kv-cache"})
    spec = tier.make_spec("s3", None, NamespaceIdentity({}, "bfloat16", "NHD", (), 1, 16, "sha256", "00"))
    ((found, renewer),) = begun
    assert found.keys.access_key == "first"
    assert renewer.is_used
    del spec
    assert not renewer.is_used
    renewer.set("nobody", "uses it")
