# SPDX-License-Identifier: Apache-2.0
"""kv_offload/tiers/s3/bucket.py: the effect of a bucket's lifecycle rules and versions on its records."""

import pytest

from kv_offload.tiers.s3.bucket import explain_bucket, is_bucket_error

NOT_VERSIONED = (200, "", b'<VersioningConfiguration xmlns="http://s3.amazonaws.com/doc/2006-03-01/"/>')
VERSIONED = (200, "", b"<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>")
EXPIRES = "<Expiration><Days>7</Days></Expiration>"


def lifecycle(*rules: str) -> tuple[int, str, bytes]:
    schema = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
    inside = "".join(f"<Rule>{rule}</Rule>" for rule in rules)
    return (
        200,
        "",
        f"<?xml version='1.0'?><LifecycleConfiguration {schema}>{inside}</LifecycleConfiguration>".encode(),
    )


def said(
    told: tuple[int, str, bytes], versioning: tuple[int, str, bytes] = NOT_VERSIONED
) -> list[tuple[str, str]]:
    return [(answer.state, answer.text) for answer in explain_bucket("kv_offload", told, versioning)]


@pytest.mark.parametrize(
    "where",
    [
        "",
        "<Filter/>",
        "<Filter><Prefix></Prefix></Filter>",
        "<Prefix>kv_off</Prefix>",
        "<Filter><Prefix>kv_offload/</Prefix></Filter>",
        "<Filter><And><Prefix>kv_offload/</Prefix></And></Filter>",
    ],
)
def test_a_rule_that_covers_the_prefix_bounds_it(where: str) -> None:
    ((state, text),) = said(lifecycle(f"<Status>Enabled</Status>{where}{EXPIRES}"))
    assert (state, text) == ("ok", "a lifecycle rule removes objects under kv_offload/ after 7 days")


@pytest.mark.parametrize(
    "rule",
    [
        f"<Status>Disabled</Status><Filter/>{EXPIRES}",
        f"<Status>Enabled</Status><Prefix>logs/</Prefix>{EXPIRES}",
        f"<Status>Enabled</Status><Filter><Prefix>kv_offload/a</Prefix></Filter>{EXPIRES}",
        f"<Status>Enabled</Status><Filter><Tag><Key>a</Key><Value>b</Value></Tag></Filter>{EXPIRES}",
        f"<Status>Enabled</Status><Filter><And><Prefix>kv_offload/</Prefix><ObjectSizeGreaterThan>1"
        f"</ObjectSizeGreaterThan></And></Filter>{EXPIRES}",
        "<Status>Enabled</Status><Filter/><Transition><Days>1</Days></Transition>",
        "<Status>Enabled</Status><Filter/><Expiration><ExpiredObjectDeleteMarker>true</ExpiredObjectDeleteMarker>"
        "</Expiration>",
    ],
)
def test_a_rule_that_does_not_cover_the_prefix_is_no_bound(rule: str) -> None:
    ((state, text),) = said(lifecycle(rule))
    assert state == "note"
    assert "no lifecycle rule covers kv_offload/: the bucket grows without bound" in text


def test_the_earliest_of_several_rules_applies() -> None:
    longer = "<Status>Enabled</Status><Filter/><Expiration><Days>30</Days></Expiration>"
    ((_, text),) = said(
        lifecycle(longer, f"<Status>Enabled</Status><Filter/>{EXPIRES}", "<Status>Enabled</Status>")
    )
    assert "after 7 days" in text
    dated = "<Status>Enabled</Status><Filter/><Expiration><Date>2027-01-01T00:00:00Z</Date></Expiration>"
    ((_, text),) = said(lifecycle(dated, f"<Status>Enabled</Status><Filter/>{EXPIRES}"))
    assert "after 7 days" in text
    alone, *_ = explain_bucket("kv_offload", lifecycle(dated), NOT_VERSIONED)
    assert (alone.text.endswith("at a date"), alone.figures) == (True, None)


@pytest.mark.parametrize(
    "schema", ["xmlns='http://s3.amazonaws.com/doc/2006-03-01/'", 'xmlns="urn:other"', ""]
)
def test_different_schemas_of_stores_are_parsed(schema: str) -> None:
    rule = "<Rule><Status> Enabled </Status><Filter/><Expiration><Days>\n7\n</Days></Expiration></Rule>"
    told = (200, "", f"<LifecycleConfiguration {schema}>{rule}</LifecycleConfiguration>".encode())
    inside = "<Status>\nEnabled</Status>"
    versions = f"<VersioningConfiguration {schema}>{inside}</VersioningConfiguration>".encode()
    (_, text), (_, older) = said(told, (200, "", versions))
    assert "after 7 days" in text
    assert "versioning is on" in older


def test_a_bucket_without_rules_is_noted_as_unbounded() -> None:
    ((state, text),) = said((404, "NoSuchLifecycleConfiguration", b""))
    assert state == "note"
    assert "grows without bound" in text


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ((403, "AccessDenied", b""), "access denied; allow s3:GetLifecycleConfiguration"),
        ((501, "NotImplemented", b""), "did not report it (501, NotImplemented)"),
        ((405, "", b""), "did not report it (405, no code)"),
        ((200, "", b"<html>"), "sent an unexpected reply"),
        ((200, "", b"<html/>"), "sent an unexpected reply"),
    ],
)
def test_an_unknown_lifecycle_is_a_note(told: tuple[int, str, bytes], why: str) -> None:
    ((state, text),) = said(told)
    assert state == "note"
    assert "unknown whether a lifecycle rule limits the bucket" in text
    assert why in text


def test_retained_noncurrent_versions_are_a_note() -> None:
    rule = f"<Status>Enabled</Status><Filter/>{EXPIRES}"
    _, (state, text) = said(lifecycle(rule), VERSIONED)
    assert (state, text.split(":")[0]) == ("note", "versioning is on")
    older = "<NoncurrentVersionExpiration><NoncurrentDays>1</NoncurrentDays></NoncurrentVersionExpiration>"
    assert len(said(lifecycle(rule + older), VERSIONED)) == 1
    _, (state, text) = said(lifecycle(rule), (403, "AccessDenied", b""))
    assert (state, "allow s3:GetBucketVersioning" in text) == ("note", True)
    _, (state, text) = said(lifecycle(rule), (200, "", b"<html/>"))
    assert (state, "sent an unexpected reply" in text) == ("note", True)
    assert len(said(lifecycle(rule), (501, "NotImplemented", b""))) == 1, "a store without versions"


def test_facts_in_the_summary_are_not_repeated() -> None:
    told_already = [(403, "InvalidAccessKeyId"), (404, "NoSuchBucket"), (301, "PermanentRedirect"), (307, "")]
    assert not any(is_bucket_error((*each, b"")) for each in told_already)
    for each in (
        (200, ""),
        (403, "AccessDenied"),
        (404, "NoSuchLifecycleConfiguration"),
        (501, "NotImplemented"),
    ):
        assert is_bucket_error((*each, b""))
