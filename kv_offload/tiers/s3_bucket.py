"""What a bucket says of itself: whether something bounds it, and whether what is removed stays."""

import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import dataclass

from kv_offload.tiers.base import Answer

Told = tuple[int, str, bytes]  # status, the code of an error, text
_SCHEMA = "{http://s3.amazonaws.com/doc/2006-03-01/}"


@dataclass(frozen=True)
class Rule:
    """One rule of a bucket's lifecycle, as far as it is about whole objects."""

    prefix: str  # of the names of the objects that it is about
    narrowed: bool  # only those with a tag, or of some sizes
    days: int | None  # after which objects expire; 0: at a date
    removes_versions: bool  # that are no longer the newest

    def covers(self, folder: str) -> bool:
        return folder.startswith(self.prefix) and not self.narrowed


def rules_of(text: bytes) -> Iterator[Rule]:
    """Those that are switched on. ValueError when it is no description of a lifecycle."""
    try:
        root = ElementTree.fromstring(text.replace(f' xmlns="{_SCHEMA[1:-1]}"'.encode(), b""))
    except ElementTree.ParseError:
        raise ValueError("no XML") from None
    if root.tag != "LifecycleConfiguration":
        raise ValueError("no lifecycle")
    for rule in root.iter("Rule"):
        if rule.findtext("Status") != "Enabled":
            continue
        prefixes = [rule.findtext(where) for where in ("Prefix", "Filter/Prefix", "Filter/And/Prefix")]
        narrow = ("Tag", "ObjectSizeGreaterThan", "ObjectSizeLessThan")
        limits = (rule.find(f"Filter/{where}{name}") for where in ("", "And/") for name in narrow)
        days = rule.findtext("Expiration/Days", "")
        at_a_date = rule.find("Expiration/Date") is not None
        yield Rule(
            prefix=next((prefix for prefix in prefixes if prefix), ""),
            narrowed=any(limit is not None for limit in limits),
            days=int(days) if days.isdecimal() else 0 if at_a_date else None,
            removes_versions=rule.find("NoncurrentVersionExpiration") is not None,
        )


def look_at_bucket(prefix: str, lifecycle: Told, versioning: Told) -> list[Answer]:
    """What the answers to "lifecycle=" and "versioning=" mean for objects under ``prefix``."""
    folder = f"{prefix}/"
    status, code, text = lifecycle
    rules: list[Rule] = []
    if status == 200:
        try:
            rules = [rule for rule in rules_of(text) if rule.covers(folder)]
        except ValueError:
            status = 0
    days = [rule.days for rule in rules if rule.days is not None]
    if days:
        when = f"after {min(days)} days" if min(days) else "at a date"
        bound = Answer("ok", f"a lifecycle rule removes objects under {folder} {when}", {"days": min(days)})
    elif status == 200 or code == "NoSuchLifecycleConfiguration":
        bound = Answer(
            "note",
            f"no lifecycle rule covers {folder}: the bucket grows without bound; let objects under it expire",
        )
    else:
        bound = Answer(
            "note",
            f"it is not known whether a lifecycle rule bounds the bucket: {_why(status, code, 'Lifecycle')}",
        )
    return [bound, *_versions(versioning, any(rule.removes_versions for rule in rules))]


def _versions(told: Told, removed: bool) -> list[Answer]:
    status, code, text = told
    if status != 200:
        why = _why(status, code, "Bucket")
        return [Answer("note", f"it is not known whether the bucket keeps older versions: {why}")]
    if b"<Status>Enabled</Status>" not in text or removed:
        return []
    return [
        Answer(
            "note",
            "versioning is on: what expires or is removed stays as an older version; suspend it, or let the "
            "rule expire older versions, too",
        )
    ]


def _why(status: int, code: str, of: str) -> str:
    if status == 403:
        right = "s3:GetLifecycleConfiguration" if of == "Lifecycle" else "s3:GetBucketVersioning"
        return f"access is denied; allow {right}, or look yourself"
    return f"the store does not say ({status}, {code or 'no code'}); look yourself"
