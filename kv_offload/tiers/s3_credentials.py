"""As whom a bucket is spoken to: where the keys come from, and how those that expire are renewed."""

import configparser
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from kv_offload.log import get_logger

if TYPE_CHECKING:
    from kv_offload._core import S3Renewer

RENEW_SECONDS = 60.0  # how often is looked; botocore asks for new keys 15 minutes before the old ones expire
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
            raise NoCredentials("a key or the session token is not one: it has spaces or line ends in it")


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
    from_file = _from_file(name)
    if from_file is not None:
        return Found(from_file, lambda: _again_from_file(name))
    found = _from_botocore(profile)
    if found is None:
        where = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY are not set, and " if profile is None else ""
        raise NoCredentials(
            f"no credentials: {where}there is no profile {name} in the file of credentials "
            "(~/.aws/credentials)"
        )
    return found


def _from_environment() -> Credentials | None:
    access = os.environ.get("AWS_ACCESS_KEY_ID", "")
    secret = os.environ.get("AWS_SECRET_ACCESS_KEY", "")
    if not access and not secret:
        return None
    if not access or not secret:
        raise NoCredentials("of AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY only one is set: set both")
    return Credentials(access, secret, os.environ.get("AWS_SESSION_TOKEN", ""))


def _from_file(profile: str) -> Credentials | None:
    try:
        path = Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")).expanduser()
    except RuntimeError:  # this user has no home
        return None
    parser = configparser.RawConfigParser()
    try:
        parser.read_string(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, configparser.Error):
        raise NoCredentials(f"{path} cannot be read as a file of credentials") from None
    if not parser.has_section(profile):
        return None
    section = parser[profile]
    access, secret = section.get("aws_access_key_id", ""), section.get("aws_secret_access_key", "")
    if not access or not secret:
        return None
    return Credentials(access, secret, section.get("aws_session_token", ""))


def _again_from_file(profile: str) -> Credentials:
    found = _from_file(profile)
    if found is None:
        raise NoCredentials(f"profile {profile} is gone from the file of credentials")
    return found


def _from_botocore(profile: str | None) -> Found | None:
    """Roles of instances and pods, single sign-on: all that botocore knows, where it is installed."""
    try:
        from botocore.credentials import RefreshableCredentials
        from botocore.session import Session
    except ImportError:
        return None
    try:
        given = Session(profile=profile).get_credentials()
        if given is None:
            return None

        def now() -> Credentials:
            frozen = given.get_frozen_credentials()
            return Credentials(frozen.access_key, frozen.secret_key, frozen.token or "")

        return Found(now(), now if isinstance(given, RefreshableCredentials) else None)
    except NoCredentials:
        raise
    except Exception as error:  # whose text may repeat what it read
        raise NoCredentials(f"botocore finds no credentials ({type(error).__name__})") from None


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
                    "%s: credentials cannot be renewed (%s); those of before are used until they can",
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
