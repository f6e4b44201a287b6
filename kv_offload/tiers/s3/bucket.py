# SPDX-License-Identifier: Apache-2.0
"""The settings of a bucket: whether a lifecycle rule limits it, and whether removed objects stay."""

import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import dataclass

from kv_offload.tiers.base import Answer

BucketReply = tuple[int, str, bytes]  # status, the code of an error, text


@dataclass(frozen=True)
class Rule:
    """The part of a lifecycle rule that concerns whole objects."""

    prefix: str  # of the names of its objects
    narrowed: bool  # limited to objects with a tag or of certain sizes
    days: int | None  # after which objects expire
    at_a_date: bool
    removes_versions: bool  # expires versions that are no longer the newest

    def covers(self, folder: str) -> bool:
        return folder.startswith(self.prefix) and not self.narrowed


def _parse(text: bytes, kind: str) -> ElementTree.Element:
    """Parses XML without name spaces, which differ between stores. Raises ValueError if it is not a
    ``kind``."""
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError:
        raise ValueError("no XML") from None
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
    if root.tag != kind:
        raise ValueError(f"no {kind}")
    return root


def _text(element: ElementTree.Element, where: str) -> str:
    return element.findtext(where, "").strip()


def rules_of(text: bytes) -> Iterator[Rule]:
    """Yields the enabled rules. Raises ValueError if the text is not a lifecycle configuration."""
    for rule in _parse(text, "LifecycleConfiguration").iter("Rule"):
        if _text(rule, "Status") != "Enabled":
            continue
        prefixes = [_text(rule, where) for where in ("Prefix", "Filter/Prefix", "Filter/And/Prefix")]
        narrow = ("Tag", "ObjectSizeGreaterThan", "ObjectSizeLessThan")
        limits = (rule.find(f"Filter/{where}{name}") for where in ("", "And/") for name in narrow)
        days = _text(rule, "Expiration/Days")
        yield Rule(
            prefix=next((prefix for prefix in prefixes if prefix), ""),
            narrowed=any(limit is not None for limit in limits),
            days=int(days) if days.isdecimal() else None,
            at_a_date=rule.find("Expiration/Date") is not None,
            removes_versions=rule.find("NoncurrentVersionExpiration") is not None,
        )


def is_bucket_error(reply: BucketReply) -> bool:
    """False for errors that the summary reports: wrong keys, a missing bucket, a bucket in another region."""
    status, code, _ = reply
    refused = status in (400, 403) and code != "AccessDenied"
    return not refused and code != "NoSuchBucket" and not 300 <= status < 400


def explain_bucket(prefix: str, lifecycle: BucketReply, versioning: BucketReply) -> list[Answer]:
    """Explains the replies to "lifecycle=" and "versioning=" for objects under ``prefix``."""
    folder = f"{prefix}/"
    status, code, text = lifecycle
    rules: list[Rule] = []
    if status == 200:
        try:
            rules = [rule for rule in rules_of(text) if rule.covers(folder)]
        except ValueError:
            status = 0  # unreadable: neither rules nor their absence is known
    days = [rule.days for rule in rules if rule.days is not None]
    removes = f"a lifecycle rule removes objects under {folder}"
    if days:
        bound = Answer("ok", f"{removes} after {min(days)} days", {"days": min(days)})
    elif any(rule.at_a_date for rule in rules):
        bound = Answer("ok", f"{removes} at a date")
    elif status == 200 or code == "NoSuchLifecycleConfiguration":
        bound = Answer(
            "note",
            f"no lifecycle rule covers {folder}: the bucket grows without bound; add one to expire objects",
        )
    else:
        bound = Answer(
            "note",
            f"unknown whether a lifecycle rule limits the bucket: {_reason(status, code, 'Lifecycle')}",
        )
    return [bound, *_versions(versioning, any(rule.removes_versions for rule in rules))]


def _versions(reply: BucketReply, removed: bool) -> list[Answer]:
    status, code, text = reply
    if status == 501:  # a store without versions
        return []
    try:
        on = status == 200 and _text(_parse(text, "VersioningConfiguration"), "Status") == "Enabled"
    except ValueError:
        status = 0
    if status != 200:
        why = _reason(status, code, "Bucket")
        return [Answer("note", f"unknown whether the bucket keeps older versions: {why}")]
    if not on or removed:
        return []
    return [
        Answer(
            "note",
            "versioning is on: expired and removed objects stay as older versions; suspend it, or let the "
            "rule expire older versions as well",
        )
    ]


def _reason(status: int, code: str, of: str) -> str:
    if status == 403:
        right = "s3:GetLifecycleConfiguration" if of == "Lifecycle" else "s3:GetBucketVersioning"
        return f"access denied; allow {right}, or check the bucket yourself"
    if status == 0:
        return "the store sent an unexpected reply; check the bucket yourself"
    return f"the store did not report it ({status}, {code or 'no code'}); check the bucket yourself"
