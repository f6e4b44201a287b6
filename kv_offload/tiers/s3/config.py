# SPDX-License-Identifier: Apache-2.0
"""The kind ``s3``: records as objects of a bucket, in AWS S3 or an S3-compatible store."""

import os
import re
from collections.abc import Mapping
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from kv_offload.sizes import format_bytes
from kv_offload.tiers.base import Answer, Threads, options_of
from kv_offload.tiers.encryption import EncryptedTierConfig
from kv_offload.tiers.s3.bucket import explain_bucket, is_bucket_error
from kv_offload.tiers.s3.credentials import Found, Renewal, find_credentials
from kv_offload.tiers.s3.place import REGION, check_endpoint, endpoint_of, region_of
from kv_offload.tiers.s3.place import Found as PlaceFound

if TYPE_CHECKING:
    from kv_offload._core import S3Bucket, S3Tier
    from kv_offload.namespace import NamespaceIdentity
    from kv_offload.tiers.remote_root import RemoteRoot

_PROBE_RECORD = 2 << 20
_MOST_PROBE_BYTES = 64 << 20
_PROBE_SECONDS = 2.0


def _is_ip_address(host: str | None) -> bool:
    try:
        ip_address(host or "")
    except ValueError:
        return False
    return True


class S3TierConfig(EncryptedTierConfig):
    """One tier of records in a bucket of AWS S3 or a compatible store, shared by all engines that use it."""

    example: ClassVar[Mapping[str, Any]] = {"type": "s3", "bucket": "kv-cache", "region": "eu-west-1"}
    place_key: ClassVar[str] = "bucket"
    bounded_by: ClassVar[str] = "only lifecycle rules limit a bucket; add one that expires objects"
    default_locality: ClassVar[Literal["LOCAL", "REMOTE"]] = "REMOTE"
    works_on_several_hosts: ClassVar[bool] = True
    schemes: ClassVar[tuple[str, ...]] = ("s3",)
    address_options: ClassVar[tuple[str, ...]] = (
        "region",
        "endpoint",
        "path_style",
        "profile",
        "ca_file",
        "op_timeout_ms",
    )

    type: Literal["s3"] = Field(
        default="s3", description="type of the tier; required, as in vLLM's own configuration"
    )
    bucket: str = Field(
        pattern=r"^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$", description="name of the bucket, which must exist"
    )
    prefix: str = Field(
        default="kv_offload",
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*$",
        max_length=256,
        description="first part of every object name",
    )
    region: str | None = Field(
        default=None,
        pattern=REGION,
        description="region of the bucket. Default: AWS_REGION, AWS_DEFAULT_REGION, the profile's region, "
        "then us-east-1",
    )
    endpoint: str | None = Field(
        default=None,
        description="https://host[:port] of an S3-compatible store, never with credentials. Default: "
        "AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, the profile's endpoint_url, then AWS",
    )
    path_style: bool | None = Field(
        default=None,
        description="address the bucket in the path instead of in the host name. Default: true with an "
        "endpoint or a dot in the bucket name, else false",
    )
    profile: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9_.@-]{1,64}$",
        description="profile in the AWS credentials file. Default: AWS_ACCESS_KEY_ID and "
        'AWS_SECRET_ACCESS_KEY, then AWS_PROFILE or the profile "default", then botocore if it is installed',
    )
    ca_file: str | None = Field(
        default=None,
        min_length=1,
        description="PEM file of the certificate authorities to trust. Default: the system's. The "
        "certificate and its name are always verified",
    )
    n_read_threads: Threads = Field(default=8, description="reader threads, for the whole engine")
    n_write_threads: Threads = Field(default=4, description="writer threads, for the whole engine")

    @field_validator("endpoint")
    @classmethod
    def _an_address(cls, value: str | None) -> str | None:
        return None if value is None else check_endpoint(value)

    @model_validator(mode="after")
    def _fit_together(self) -> "S3TierConfig":
        if problem := self._misfit(self.endpoint):
            raise ValueError(problem)
        return self

    def _misfit(self, endpoint: str | None) -> str | None:
        """Returns why other settings contradict this endpoint."""
        if self.ca_file is not None and (endpoint or "").startswith("http:"):
            return "ca_file is given but endpoint is not https://, so nothing would be verified"
        if self.path_style is False and _is_ip_address(urlsplit(endpoint or "").hostname):
            return (
                "path_style is false but endpoint is an IP address, which cannot carry a bucket name: give "
                "its host name, or leave path_style out"
            )
        return None

    def _endpoint(self) -> PlaceFound | None:
        """Returns the effective endpoint. Raises ValueError if it is invalid or contradicts the settings."""
        found = endpoint_of(self.endpoint, self.profile)
        if found is not None and (problem := self._misfit(found.value)):
            raise ValueError(f"{problem} ({found.source})")
        return found

    def _at(self) -> str:
        try:
            found = self._endpoint()
        except ValueError:
            return ""  # problems() reports it
        return f" at {found.value}" if found else ""

    @property
    def place(self) -> str:
        """Returns the bucket and the prefix, and the store if it is not AWS."""
        return f"{self.bucket}/{self.prefix}{self._at()}"

    @classmethod
    def entry_of_address(cls, address: str) -> dict[str, Any]:
        """Parses s3://bucket/prefix; the default prefix applies without one."""
        bare, options = options_of(address, cls.address_options)
        scheme, _, place = bare.partition("://")
        bucket, _, prefix = place.partition("/")
        if scheme.lower() != "s3" or not re.fullmatch(r"[A-Za-z0-9_.-]+", bucket):
            raise ValueError(
                "an s3 address is s3://bucket/prefix, without credentials, which would appear in logs and "
                "process lists: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or ?profile="
            )
        prefix = prefix.strip("/")
        return cls.entry(bucket) | ({"prefix": prefix} if prefix else {}) | options

    def open_root(self, *, changes: bool, given: str = "") -> "RemoteRoot":
        """Opens the objects under its prefix."""
        from kv_offload import _core
        from kv_offload.tiers.remote_root import RemoteRoot

        refused = self.problems()
        if refused:
            raise ValueError(refused[0])
        found = find_credentials(self.profile)
        bucket = self._bucket(found)
        Renewal(found, bucket.renewer(), self.label()).start()
        records = _core.s3_records(bucket, prefix=self.prefix, deadline_seconds=self.op_timeout_seconds)
        return RemoteRoot(records, f"s3://{self.bucket}/{self.prefix}{self._at()}", f"s3://{self.bucket}/")

    def _bucket(self, found: Found) -> "S3Bucket":
        from kv_offload import _core

        endpoint = self._endpoint()
        path_style = self.path_style
        if path_style is None:
            path_style = endpoint is not None or "." in self.bucket
        return _core.S3Bucket(
            name=self.bucket,
            endpoint=endpoint.value if endpoint else "",
            region=region_of(self.region, self.profile, of_aws=endpoint is None).value,
            path_style=path_style,
            ca_file=self.ca_file or "",
            access_key=found.keys.access_key,
            secret_key=found.keys.secret_key,
            session_token=found.keys.session_token,
        )

    def problems(self, record_bytes: int = 0) -> list[str]:
        """Returns the problems of this host; the store is contacted when it is opened."""
        from kv_offload import _core

        problems = []
        if reason := _core.s3_unavailable_reason():
            problems.append(f"{self.label()}: {reason}")
        try:
            endpoint = self._endpoint()
            region_of(self.region, self.profile, of_aws=endpoint is None)
            find_credentials(self.profile)
        except ValueError as error:
            problems.append(f"{self.label()}: {error}")
        if self.ca_file is not None and not os.access(self.ca_file, os.R_OK):
            problems.append(f"{self.label()}: ca_file {self.ca_file} cannot be read")
        return problems + self.key_problems()

    def _probe(self, records: int = 0) -> dict[str, Any]:
        """Probes the store. Raises RuntimeError if it does not answer, ValueError if it refuses access or
        there are no credentials."""
        from kv_offload import _core

        bucket = self._bucket(find_credentials(self.profile))
        seconds = min(self.op_timeout_seconds, _PROBE_SECONDS) if records == 0 else self.op_timeout_seconds
        return _core.probe_s3(bucket, self.prefix, _PROBE_RECORD, records, seconds)

    def cautions(self) -> list[str]:
        """Warns if the store does not answer."""
        try:
            self._probe()
        except ValueError:
            return []  # a problem, or refused: summary() and the start report the reason
        except RuntimeError as error:
            return [f"{self.label()} is not used until it answers: {error}"]
        return []

    def summary(self) -> Answer:
        """Returns its endpoint, region and latency."""
        from kv_offload import _core

        try:
            return Answer("ok", f"{self._described(self._probe())}, libcurl {_core.s3_library_version()}")
        except ValueError as error:
            return Answer("refused", str(error))
        except RuntimeError as error:
            return Answer("note", f"does not answer: {error}")

    def findings(self) -> list[Answer]:
        """Returns the encryption key, the limit by a lifecycle rule, and whether older versions stay."""
        return super().findings() + self._bucket_findings()

    def _bucket_findings(self) -> list[Answer]:
        from kv_offload import _core

        try:
            bucket = self._bucket(find_credentials(self.profile))
            seconds = min(self.op_timeout_seconds, _PROBE_SECONDS)
            lifecycle = _core.ask_s3_bucket(bucket, "lifecycle=", seconds)
            if not is_bucket_error(lifecycle):
                return []
            versioning = _core.ask_s3_bucket(bucket, "versioning=", seconds)
        except (RuntimeError, ValueError):
            return []  # the summary reports it
        return explain_bucket(self.prefix, lifecycle, versioning)

    def _described(self, found: Mapping[str, Any]) -> str:
        endpoint = self._endpoint()
        region = region_of(self.region, self.profile, of_aws=endpoint is None)
        tls = "no TLS" if endpoint and endpoint.value.startswith("http:") else "TLS"
        where = f"endpoint {endpoint}, " if endpoint and endpoint.source else ""
        return f"{where}region {region}, answers in {found['answer_seconds'] * 1e3:.2f} ms, {tls}"

    def measure(self, total_bytes: int) -> Answer:
        """Writes and reads temporary objects on one connection."""
        records = max(1, min(total_bytes, _MOST_PROBE_BYTES) // _PROBE_RECORD)
        try:
            found = self._probe(records)
        except (RuntimeError, ValueError) as error:
            return Answer("refused", str(error))
        if found["write_refused"]:
            state: Literal["note", "refused"] = "note" if self.write_policy == "read_only" else "refused"
            return Answer(state, f"{self._described(found)}; {found['write_refused']}", found)
        write, read = (
            f"{format_bytes(int(found[f'{verb}_bytes_per_second']))}/s" for verb in ("write", "read")
        )
        size = f"{found['records']} objects of {format_bytes(_PROBE_RECORD)} on one connection"
        return Answer("ok", f"writes {write}, reads {read}, {self._described(found)}; {size}", found)

    def make_spec(self, name: str, bound: int | None, identity: "NamespaceIdentity") -> "S3Tier":
        """Returns an S3 tier, whose credentials are renewed while it is in use."""
        from kv_offload import _core

        found = find_credentials(self.profile)
        bucket = self._bucket(found)
        Renewal(found, bucket.renewer(), self.label()).start()
        return _core.S3Tier(
            bucket=bucket,
            namespace_id=identity.namespace_id(),
            name=name,
            prefix=self.prefix,
            n_read_threads=self.n_read_threads,
            n_write_threads=self.n_write_threads,
            op_timeout_seconds=self.op_timeout_seconds,
        )
