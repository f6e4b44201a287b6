# SPDX-License-Identifier: Apache-2.0
"""``encryption_key_file`` of every type of tier: refused files, messages, and the core's keys."""

import os

import pytest
from pydantic import ValidationError
from written_root import FACTS

from kv_offload.tiers.encryption import EncryptedTierConfig
from kv_offload.tiers.registry import parse_tier

PLACES = {
    "fs": {"type": "fs", "max_bytes": "1GiB"},
    "redis": {"type": "redis", "url": "redis://127.0.0.1:1/0"},
    "s3": {"type": "s3", "bucket": "kv-cache", "endpoint": "http://127.0.0.1:1"},
}


def tier_of(kind, tmp_path, **keys) -> EncryptedTierConfig:
    place = {"root_dir": str(tmp_path / "root")} if kind == "fs" else {}
    tier = parse_tier(PLACES[kind] | place | keys)
    assert isinstance(tier, EncryptedTierConfig)
    return tier


@pytest.fixture
def key(tmp_path):
    path = tmp_path / "key"
    path.write_bytes(bytes(range(32)))
    path.chmod(0o600)
    return path


@pytest.fixture(autouse=True)
def credentials(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")


@pytest.mark.parametrize("kind", PLACES)
def test_a_good_key_reaches_the_core_and_is_named_by_its_id(kind, tmp_path, key):
    tier = tier_of(kind, tmp_path, encryption_key_file=str(key))
    assert tier.key_problems() == []
    assert tier.traits() == ["write_through", "compress auto", "encrypted"]
    spec = tier.spec("tier", 1 << 30, FACTS)
    assert spec.encryption_key_files == [str(key)]
    told = tier.findings()[0]
    assert told.state == "ok"
    assert "encrypted with key" in told.text
    assert key.read_bytes().hex()[:8] not in told.text


@pytest.mark.parametrize("kind", PLACES)
def test_without_a_key_records_are_not_encrypted(kind, tmp_path):
    tier = tier_of(kind, tmp_path)
    assert tier.key_problems() == []
    assert tier.traits() == ["write_through", "compress auto"]
    assert tier.spec("tier", 1 << 30, FACTS).encryption_key_files == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda key: key.chmod(0o640), "chmod 600"),
        (lambda key: key.chmod(0o604), "chmod 600"),
        (lambda key: key.write_bytes(b"k" * 31), "has 31 bytes: it must have exactly 32"),
        (lambda key: key.write_text("k" * 64), "has 64 bytes: it must have exactly 32"),
        (lambda key: key.unlink(), "No such file"),
        (lambda key: (key.unlink(), key.mkdir()), "not a regular file"),
    ],
)
@pytest.mark.parametrize("kind", PLACES)
def test_an_invalid_file_is_refused_before_files_are_created(kind, change, said, tmp_path, key):
    change(key)
    tier = tier_of(kind, tmp_path, encryption_key_file=str(key))
    problems = tier.problems()
    assert len(problems) == 1
    assert said in problems[0]
    assert str(key) in problems[0]
    assert tier.findings()[0].state == "refused"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file away")
def test_a_file_of_another_user_is_refused(tmp_path, key):
    os.chown(key, 12345, 0)
    problems = tier_of("fs", tmp_path, encryption_key_file=str(key)).problems()
    assert "belongs to user 12345" in problems[0]


def test_a_list_encrypts_with_the_first_key_and_decrypts_with_all(tmp_path, key):
    old = tmp_path / "old"
    old.write_bytes(b"o" * 32)
    old.chmod(0o400)
    tier = tier_of("fs", tmp_path, encryption_key_file=[str(key), str(old)])
    assert "can be decrypted too" in tier.findings()[0].text
    assert tier.portable()["encryption_key_file"] == [str(key), str(old)]
    twice = tier_of("fs", tmp_path, encryption_key_file=[str(key), str(key)])
    assert "the same key twice" in twice.problems()[0]


@pytest.mark.parametrize("given", [[], "", [""], 7, {"path": "/key"}, [f"/key{n}" for n in range(9)]])
def test_a_value_without_file_names_is_refused(given, tmp_path):
    with pytest.raises(ValidationError, match="encryption_key_file"):
        tier_of("fs", tmp_path, encryption_key_file=given)


def test_a_relative_path_starts_at_the_working_directory(tmp_path, key, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert tier_of("fs", tmp_path, encryption_key_file="key").encryption_key_file == (str(key),)
