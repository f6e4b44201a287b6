"""As whom a bucket is spoken to: where the keys come from, and how those that expire are renewed."""

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

RENEW_SECONDS = 60.0  # how often is looked; botocore asks for new keys 15 minutes before the old ones expire
# The settings of a profile by which others give its keys.
_BEFORE_KEYS = ("role_arn", "web_identity_token_file", "sso_account_id", "sso_role_name")
_WAYS = (*_BEFORE_KEYS, "login_session", "credential_process", "credential_source")
_logger = get_logger(__name__)


class NoCredentials(ValueError):
    """Its text is ours and repeats nothing that was read."""


@dataclass(frozen=True)
class Credentials:
    """Their repr shows nothing of them."""

    access_key: str = field(repr=False)
    secret_key: str = field(repr=False)
    session_token: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        signs = self.access_key + self.secret_key + self.session_token
        if any(ord(sign) <= 32 or ord(sign) > 126 for sign in signs):
            raise NoCredentials("a key or the session token is invalid: it contains spaces or line breaks")


Source = Callable[[], Credentials]  # gives those of now; raises when there are none


@dataclass(frozen=True)
class Found:
    """The keys, and where to ask for newer ones; None: they stay as they are."""

    keys: Credentials
    source: Source | None = None


def find_credentials(profile: str | None) -> Found:
    """Read when they are needed and kept nowhere. NoCredentials that names the setting."""
    from_environment = _from_environment() if profile is None else None
    if from_environment is not None:
        return Found(from_environment)
    name = profile or os.environ.get("AWS_PROFILE") or "default"
    way = _way_of_botocore(name)
    _refuse_codes(name)
    from_file = _from_file(name) if way is None else None
    if from_file is not None:
        return Found(from_file, lambda: _again_from_file(name))
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
    """Of one of the files of AWS's tools; empty where there is none."""
    parser = configparser.RawConfigParser()
    given = os.environ.get(variable, f"~/.aws/{of}")
    try:
        path = Path(given).expanduser()
    except RuntimeError:  # this user has no home
        return parser
    if not given:  # as AWS's tools take it: no file
        return parser
    try:
        parser.read_string(path.read_text())
    except FileNotFoundError:
        pass
    except OSError:
        # The keys may stand in the other file.
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
    """All that is set for a profile, in either file."""
    sections = _sections("AWS_CONFIG_FILE", "config")
    names = (["default"] if profile == "default" else []) + [f"profile {profile}"]
    found: dict[str, str] = {}
    for name in names:
        found |= dict(sections[name]) if sections.has_section(name) else {}
    return {**found, **_in_credentials(profile)}


def service_settings(profile: str, service: str) -> Mapping[str, str]:
    """What the profile's section ``services`` sets for one service, in indented lines below its name."""
    section = f"services {profile_settings(profile).get('services', '')}"
    sections = _sections("AWS_CONFIG_FILE", "config")
    lines = sections.get(section, service, fallback="").splitlines() if sections.has_section(section) else []
    pairs = (line.partition("=") for line in lines if "=" in line)
    return {key.strip(): value.strip() for key, _, value in pairs}


def _refuse_codes(profile: str) -> None:
    """A role that needs a code of the moment: botocore would wait for somebody to type it."""
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


def _way_of_botocore(profile: str) -> str | None:
    """The setting of the profile by which others give its keys; it goes before keys that stand beside it."""
    section = profile_settings(profile)
    found = [setting for setting in _WAYS if section.get(setting)]
    # As in AWS's own tools: a program or a sign-in comes after keys in the file of credentials.
    if found and found[0] not in _BEFORE_KEYS and _in_credentials(profile).get("aws_access_key_id"):
        return None
    return found[0] if found else None


def _from_file(profile: str) -> Credentials | None:
    section = _in_credentials(profile)
    access, secret = section.get("aws_access_key_id", ""), section.get("aws_secret_access_key", "")
    if not access or not secret:
        return None
    return Credentials(access, secret, section.get("aws_session_token", ""))


def _again_from_file(profile: str) -> Credentials:
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
    """Drops what botocore logs on a thread that asks it for keys: where it found them, the whole answers of
    services, which have keys in them, and errors that repeat them. Others who use it log as before."""

    def __init__(self) -> None:
        super().__init__()
        self._asking = threading.local()

    def filter(self, record: logging.LogRecord) -> bool:
        return not getattr(self._asking, "now", False)

    @contextmanager
    def on_this_thread(self) -> Iterator[None]:
        # Filters are not inherited, so that each logger has it; adding it again changes nothing.
        for name in [*logging.root.manager.loggerDict]:
            if name.partition(".")[0] in ("botocore", "urllib3"):
                logging.getLogger(name).addFilter(self)
        self._asking.now = True
        try:
            yield
        finally:
            self._asking.now = False


_silence = _Silence()


def _from_botocore(profile: str | None, name: str) -> Found | None:
    """Roles of instances and pods, single sign-on: all that botocore knows, where it is installed."""
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
    """What an error of botocore means; its own text may repeat what it read."""
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
    """Gives a bucket the keys of now, for as long as anything uses it. No error of a source ends it, and none
    of others is shown: its text may repeat what it read."""

    def __init__(self, found: Found, renewer: "S3Renewer", label: str) -> None:
        self._keys, self._source = found.keys, found.source
        self._renewer, self._label = renewer, label
        self._failed = False

    def start(self) -> None:
        """On a thread of its own, which keeps no process alive; none where nothing can be newer."""
        if self._source is not None:
            threading.Thread(target=self._run, name="kv-offload-s3-keys", daemon=True).start()

    def look(self) -> bool:
        """Once. False: nothing uses the bucket any more."""
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
        while self.look():
            pause.wait(RENEW_SECONDS)
