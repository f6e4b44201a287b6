# SPDX-License-Identifier: Apache-2.0
"""Endpoint and region of a bucket, from the configuration or from the sources of AWS's tools."""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from kv_offload.tiers.s3.credentials import NoCredentials, profile_settings, service_settings

DEFAULT_REGION = "us-east-1"
REGION = r"^[A-Za-z0-9_-]{1,40}$"
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")  # the first one that is set wins, as in AWS's tools
_REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")


@dataclass(frozen=True)
class Found:
    """``source``: its origin, for display; empty for the configuration and for the default."""

    value: str
    source: str = ""

    def __str__(self) -> str:
        return f"{self.value} ({self.source})" if self.source else self.value


def check_endpoint(value: str) -> str:
    """Returns the endpoint up to its host and port. Raises ValueError, which shows no part of it."""
    try:
        parts = urlsplit(value)
        port = parts.port
    except ValueError:
        raise ValueError("is not a store address; write https://host[:port]") from None
    if parts.username is not None or parts.password is not None:
        raise ValueError(
            "contains credentials, which would appear in logs and process lists: remove them and set "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or profile"
        )
    if (
        parts.scheme not in ("http", "https")
        or not parts.hostname
        or port == 0
        or parts.path.strip("/")
        or parts.query
        or parts.fragment
    ):
        raise ValueError("is not a store address; write https://host[:port]")
    return f"{parts.scheme}://{parts.netloc}"


def endpoint_of(given: str | None, profile: str | None) -> Found | None:
    """Returns the endpoint of the configuration, the environment or the profile; None: AWS's own.

    Raises ValueError naming the invalid source."""
    if given is not None:
        return Found(given)
    if os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() == "true":
        return None
    found = _from_environment(_ENDPOINTS) or _from_profile(
        profile, lambda name: service_settings(name, "s3").get("endpoint_url"), "endpoint_url"
    )
    if found is None:
        return None
    try:
        return Found(check_endpoint(found.value), found.source)
    except ValueError as error:
        raise ValueError(f"{found.source} {error}") from None


def region_of(given: str | None, profile: str | None, *, of_aws: bool) -> Found:
    """Returns the region of the configuration, the environment, the profile, or AWS's default.

    It is part of each signature: in lower case for AWS, unchanged for other stores. Raises ValueError.
    """
    found = (
        Found(given)
        if given is not None
        else _from_environment(_REGIONS) or _from_profile(profile, None, "region")
    )
    if found is None:
        return Found(DEFAULT_REGION)
    if not re.match(REGION, found.value):
        raise ValueError(f"{found.source or 'region'} is not a valid region: use letters, digits, - and _")
    return Found(found.value.lower(), found.source) if of_aws else found


def _from_environment(names: tuple[str, ...]) -> Found | None:
    return next((Found(value, name) for name in names if (value := os.environ.get(name, "").strip())), None)


def _from_profile(profile: str | None, more: Callable[[str], str | None] | None, key: str) -> Found | None:
    name = profile or os.environ.get("AWS_PROFILE") or "default"
    try:
        settings: Mapping[str, str] = profile_settings(name)
        value = (more(name) if more is not None else None) or settings.get(key)
    except NoCredentials:  # an unreadable file is reported by the search for keys
        return None
    return Found(value.strip(), f"{key} of profile {name}") if value else None
