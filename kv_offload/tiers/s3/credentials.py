# SPDX-License-Identifier: Apache-2.0
"""Credentials for a bucket: the source of the keys, and the renewal of keys that expire."""

import configparser
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from kv_offload.log import get_logger

if TYPE_CHECKING:
    from kv_offload._core import S3Renewer

RENEW_SECONDS = 60.0  # between checks; botocore requests new keys 15 minutes before the old ones expire
# Profile settings that name an external source of its keys.
_BEFORE_KEYS = ("role_arn", "web_identity_token_file", "sso_account_id", "sso_role_name")
_WAYS = (*_BEFORE_KEYS, "login_session", "credential_process", "credential_source")
_logger = get_logger(__name__)


class NoCredentials(ValueError):
    """Its text shows no content of the files or variables."""


@dataclass(frozen=True)
class Credentials:
    """Access keys; their repr shows none of them."""

    access_key: str = field(repr=False)
    secret_key: str = field(repr=False)
    session_token: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        signs = self.access_key + self.secret_key + self.session_token
        if any(ord(sign) <= 32 or ord(sign) > 126 for sign in signs):
            raise NoCredentials("a key or the session token is invalid: it contains spaces or line breaks")


Source = Callable[[], Credentials]  # returns the current ones; raises if there are none


@dataclass(frozen=True)
class Found:
    """The keys and the source of newer ones; None: the keys never change."""

    keys: Credentials
    source: Source | None = None


def find_credentials(profile: str | None) -> Found:
    """Reads the keys when they are needed and stores no copy. Raises NoCredentials naming the setting."""
    from_environment = _from_environment() if profile is None else None
    if from_environment is not None:
        return Found(from_environment)
    name = profile or os.environ.get("AWS_PROFILE") or "default"
    # A profile that gets its keys in another way does not use those of the credentials file.
    way = _external_key_setting(name)
    _refuse_codes(name)
    from_file = _from_file(name) if way is None else None
    if from_file is not None:
        return Found(from_file, lambda: _reload_from_file(name))
    found = _from_botocore(profile, name)
    if found is not None:
        return found
    if way is not None and not _has_botocore():
        raise NoCredentials(
            f"no credentials: profile {name} gets its keys through {way}, which needs botocore: pip install "
            "botocore"
        )
    where = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY are not set, and " if profile is None else ""
    more = "" if _has_botocore() else "; instance and pod roles need botocore: pip install botocore"
    raise NoCredentials(
        f"no credentials: {where}profile {name} has no keys in the credentials file "
        f"(~/.aws/credentials){more}"
    )


def _from_environment() -> Credentials | None:
    access = os.environ.get("AWS_ACCESS_KEY_ID", "")
    secret = os.environ.get("AWS_SECRET_ACCESS_KEY", "")
    if not access and not secret:
        return None
    if not access or not secret:
        raise NoCredentials("only one of AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY is set: set both")
    return Credentials(access, secret, os.environ.get("AWS_SESSION_TOKEN", ""))


def _sections(variable: str, of: Literal["credentials", "config"]) -> configparser.RawConfigParser:
    """Returns the sections of one of AWS's files; empty if there is no file."""
    parser = configparser.RawConfigParser()
    given = os.environ.get(variable, f"~/.aws/{of}")
    try:
        path = Path(given).expanduser()
    except RuntimeError:  # this user has no home directory
        return parser
    if not given:  # like AWS's tools: an empty value means no file
        return parser
    try:
        parser.read_string(path.read_text())
    except FileNotFoundError:
        pass
    except OSError:
        # The keys may be in the other file.
        if of == "credentials":
            raise NoCredentials(f"{path} cannot be read as a credentials file") from None
    except (UnicodeDecodeError, configparser.Error):
        what = "credentials" if of == "credentials" else "settings"
        raise NoCredentials(f"{path} cannot be read as a {what} file") from None
    return parser


def _in_credentials(profile: str) -> Mapping[str, str]:
    sections = _sections("AWS_SHARED_CREDENTIALS_FILE", "credentials")
    return dict(sections[profile]) if sections.has_section(profile) else {}


def profile_settings(profile: str) -> Mapping[str, str]:
    """Returns all settings of a profile, from both files."""
    sections = _sections("AWS_CONFIG_FILE", "config")
    names = (["default"] if profile == "default" else []) + [f"profile {profile}"]
    found: dict[str, str] = {}
    for name in names:
        found |= dict(sections[name]) if sections.has_section(name) else {}
    return {**found, **_in_credentials(profile)}


def service_settings(profile: str, service: str) -> Mapping[str, str]:
    """Returns the settings of one service: the indented lines below its name in the profile's
    ``services``."""
    section = f"services {profile_settings(profile).get('services', '')}"
    sections = _sections("AWS_CONFIG_FILE", "config")
    lines = sections.get(section, service, fallback="").splitlines() if sections.has_section(section) else []
    pairs = (line.partition("=") for line in lines if "=" in line)
    return {key.strip(): value.strip() for key, _, value in pairs}


def _refuse_codes(profile: str) -> None:
    """Raises NoCredentials for a role that needs an MFA code: botocore would wait for a user to type it."""
    seen: set[str] = set()
    while profile and profile not in seen:
        seen.add(profile)
        section = profile_settings(profile)
        if not section.get("role_arn") or section.get("web_identity_token_file"):
            return
        if section.get("mfa_serial"):
            raise NoCredentials(
                f"no credentials: the role of profile {profile} has mfa_serial, and MFA codes cannot "
                "be entered here: use single sign-on (aws sso login), or a role without mfa_serial"
            )
        profile = section.get("source_profile", "")


def _external_key_setting(profile: str) -> str | None:
    """Returns the profile setting that names an external source of keys; it precedes keys in the same
    section."""
    section = profile_settings(profile)
    found = [setting for setting in _WAYS if section.get(setting)]
    # As in AWS's tools: keys in the credentials file precede a program or a sign-in.
    if found and found[0] not in _BEFORE_KEYS and _in_credentials(profile).get("aws_access_key_id"):
        return None
    return found[0] if found else None


def _from_file(profile: str) -> Credentials | None:
    section = _in_credentials(profile)
    access, secret = section.get("aws_access_key_id", ""), section.get("aws_secret_access_key", "")
    if not access or not secret:
        return None
    return Credentials(access, secret, section.get("aws_session_token", ""))


def _reload_from_file(profile: str) -> Credentials:
    found = _from_file(profile)
    if found is None:
        raise NoCredentials(f"profile {profile} is missing from the credentials file")
    return found


def _has_botocore() -> bool:
    try:
        import botocore.session  # noqa: F401
    except ImportError:
        return False
    return True


class _Silence(logging.Filter):
    """Drops botocore's log lines on a thread that requests keys. They contain the source of the keys,
    complete service replies with keys in them, and errors that repeat them. Other users of botocore log as
    before."""

    def __init__(self) -> None:
        super().__init__()
        self._requesting = threading.local()

    def filter(self, record: logging.LogRecord) -> bool:
        return not getattr(self._requesting, "now", False)

    @contextmanager
    def on_this_thread(self) -> Iterator[None]:
        # Loggers do not inherit filters, so each one gets it; adding it twice has no effect.
        for name in [*logging.root.manager.loggerDict]:
            if name.partition(".")[0] in ("botocore", "urllib3"):
                logging.getLogger(name).addFilter(self)
        self._requesting.now = True
        try:
            yield
        finally:
            self._requesting.now = False


_silence = _Silence()


def _from_botocore(profile: str | None, name: str) -> Found | None:
    """Returns keys from botocore (instance and pod roles, single sign-on); None if it is not installed."""
    try:
        from botocore.credentials import RefreshableCredentials
        from botocore.session import Session
    except ImportError:
        return None

    def now() -> Credentials:
        with _silence.on_this_thread():
            frozen = given.get_frozen_credentials()
        return Credentials(frozen.access_key, frozen.secret_key, frozen.token or "")

    try:
        with _silence.on_this_thread():
            given = Session(profile=profile).get_credentials()
        if given is None:
            return None
        return Found(now(), now if isinstance(given, RefreshableCredentials) else None)
    except NoCredentials:
        raise
    except Exception as error:
        raise NoCredentials(_sentence(error, name)) from None


def _sentence(error: Exception, profile: str) -> str:
    """Explains a botocore error without its text, which may repeat secrets."""
    kind = type(error).__name__
    if kind == "ProfileNotFound":
        return f"there is no profile {profile}, neither in ~/.aws/credentials nor in ~/.aws/config"
    if kind in ("SSOTokenLoadError", "UnauthorizedSSOTokenError", "TokenRetrievalError", "NoAuthTokenError"):
        return f"profile {profile} has no valid sign-in: aws sso login --profile {profile} ({kind})"
    if kind.startswith("Login"):
        return f"profile {profile} has no valid sign-in: aws login --profile {profile} ({kind})"
    if kind == "NoRegionError":
        return f"profile {profile} has no region, which its role needs: set it in ~/.aws/config"
    code = getattr(error, "response", {}).get("Error", {}).get("Code", "")
    code = f" {code}" if re.fullmatch(r"[A-Za-z]{1,60}", code) else ""
    return f"botocore finds no credentials for profile {profile} ({kind}{code})"


class Renewal:
    """Gives a bucket the current keys while it is in use. No error of a source ends it. The texts of foreign
    errors are not shown, because they may repeat secrets."""

    def __init__(self, found: Found, renewer: "S3Renewer", label: str) -> None:
        self._keys, self._source = found.keys, found.source
        self._renewer, self._label = renewer, label
        self._failed = False

    def start(self) -> None:
        """Starts a daemon thread; none if the keys cannot change."""
        if self._source is not None:
            threading.Thread(target=self._run, name="kv-offload-s3-keys", daemon=True).start()

    def refresh(self) -> bool:
        """Checks for new keys once. Returns False if the bucket is no longer in use."""
        if not self._renewer.is_used or self._source is None:
            return False
        try:
            keys = self._source()
        except Exception as error:
            if not self._failed:
                reason = str(error) if isinstance(error, NoCredentials) else type(error).__name__
                _logger.warning(
                    "%s: credentials cannot be renewed (%s); the previous ones stay in use",
                    self._label,
                    reason,
                )
            self._failed = True
            return True
        self._failed = False
        if keys != self._keys:
            self._keys = keys
            self._renewer.set(keys.access_key, keys.secret_key, keys.session_token)
            _logger.info("%s: credentials were renewed", self._label)
        return True

    def _run(self) -> None:
        pause = threading.Event()
        while self.refresh():
            pause.wait(RENEW_SECONDS)
