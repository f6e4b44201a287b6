# SPDX-License-Identifier: Apache-2.0
"""Addresses given to kv-offload stat|ls|verify|purge, and the handling of server replies."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner

from kv_offload.cli import app, root_commands
from kv_offload.tiers import registry as tiers
from kv_offload.tiers import remote_root

ACCESS, PASSWORD = "AKIA-never-shown", "hunter2-never-shown"
COMMANDS = (["stat"], ["ls"], ["verify"], ["purge", "--yes"], ["evict", "--max-bytes", "1GiB"], ["bench"])


def run(*arguments: Any, status: int = 0) -> Any:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == status, f"{result.output}\n{result.exception!r}"
    assert "Traceback" not in result.output
    return result


# ---- addresses


@pytest.mark.parametrize(
    ("address", "entry"),
    [
        ("redis://cache:7000/3", {"type": "redis", "url": "redis://cache:7000/3"}),
        (
            "rediss://kv@cache?password_env=PW&key_prefix=kv&ca_file=/ca",
            {
                "type": "redis",
                "url": "rediss://kv@cache",
                "password_env": "PW",
                "key_prefix": "kv",
                "ca_file": "/ca",
            },
        ),
        (
            "unix:///run/s?key_prefix=kv&db=2",
            {"type": "redis", "url": "unix:///run/s?db=2", "key_prefix": "kv"},
        ),
        ("s3://kv-cache", {"type": "s3", "bucket": "kv-cache"}),
        ("s3://kv-cache/a/b/", {"type": "s3", "bucket": "kv-cache", "prefix": "a/b"}),
        (
            "S3://kv-cache/a?region=eu-west-1&endpoint=https%3A//store:9000",
            {
                "type": "s3",
                "bucket": "kv-cache",
                "prefix": "a",
                "region": "eu-west-1",
                "endpoint": "https://store:9000",
            },
        ),
    ],
)
def test_an_address_is_the_entry_of_a_tier(address: str, entry: dict[str, str]) -> None:
    assert tiers.entry_at(address) == entry


@pytest.mark.parametrize(
    "address",
    [
        *(f"{scheme}://u:{PASSWORD}@host" for scheme in ("redis", "rediss", "REDIS", "valkey", "s3", "unix")),
        *(f"redis:{slash}u:{PASSWORD}@host" for slash in ("", "/", "///")),
        *(f"redis://host?{name}={PASSWORD}" for name in ("password", "PASSWORD", "url", "type")),
        *(f"redis://host?{PASSWORD}", f"redis://host/{PASSWORD}", f"redis://host#{PASSWORD}"),
        f"redis://host:{PASSWORD}",
        f"u:{PASSWORD}@host:6379",
        f"fs=redis://u:{PASSWORD}@host",
        f"redis=redis://u:{PASSWORD}@host",
        *(f"s3://bucket/p?secret_key={PASSWORD}", f"s3:{PASSWORD}@bucket"),
        f"s3://bucket/p?endpoint=https://{ACCESS}:{PASSWORD}@store",
        f" redis://u:{PASSWORD}@host",
        *(f"{start}//u:{PASSWORD}@host" for start in ("redis", "redis;", "", ".", "./x")),
        *(f"{start}u:{PASSWORD}@host" for start in ("/", "./")),
        *(f"s3={ACCESS}:{PASSWORD}@bucket", f"s3=b?secret={PASSWORD}"),
        *(f"redis://u:x?{PASSWORD}=2@host", f"redis://u:x?key_prefix={PASSWORD}@host"),
    ],
)
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: str(command[0]))
def test_a_possible_password_is_never_repeated(address: str, command: list[str]) -> None:
    name, *options = command
    result = run(name, address, *options, status=2)
    assert PASSWORD not in result.output + result.stderr
    assert "kv-offload: " in result.stderr


def test_no_part_of_a_password_is_parsed_as_an_option() -> None:
    assert "hunter" not in run("stat", "redis://u:x?hunter=2@host", status=2).stderr


def test_an_unknown_option_is_named_with_the_valid_ones() -> None:
    said = run("stat", "redis://host?prefix=x", status=2).stderr
    assert "option prefix" in said
    assert "key_prefix=..., password_env=..." in said
    assert "key_prefix" in run("stat", "redis://host?key_prefix=a%20b", status=2).stderr


def test_an_unreachable_server_is_reported(tmp_path: Path) -> None:
    for command in (["stat"], ["ls"], ["verify"], ["purge", "--yes"]):
        said = run(command[0], f"unix://{tmp_path}/nobody", *command[1:], status=1).stderr
        assert f"unix://{tmp_path}/nobody" in said


def test_a_kind_without_these_commands_is_refused() -> None:
    class Other(tiers.TierConfig):
        example: ClassVar[Mapping[str, Any]] = {"type": "other", "where": "x"}
        place_key: ClassVar[str] = "where"
        type: str = "other"
        where: str = "x"

        def make_spec(self, name: str, bound: int | None, identity: Any) -> Any:
            raise NotImplementedError

    with pytest.raises(ValueError, match="other x: this command does not support"):
        Other().open_root(changes=False)


def test_a_name_is_shown_escaped_and_short() -> None:
    assert remote_root.shown_name(b"a\xff\x1b[31m\n") == "a\\xff\\x1b[31m\\n"
    assert remote_root.shown_name("ключ".encode()) == "ключ"
    assert len(remote_root.shown_name(b"x" * 1_000_000)) == 120


# ---- server replies


def record_of(number: int, **given: Any) -> Any:
    key = f"{number:072x}"
    facts = {
        "namespace_id": "ab" * 32,
        "epoch": "e" * 32,
        "key": key,
        "size": 10,
        "used": 0.0,
        "written": 0.0,
    }
    return SimpleNamespace(name=f"kv_offload:{'ab' * 32}:{'e' * 32}:{key}".encode(), **facts | given)


class Scripted:
    """The core's records, scripted by a test."""

    takes_threads = keeps_versions = False

    def __init__(self, pages: list[list[Any]], verdict: tuple[str, str, bool] = ("ok", "", False)) -> None:
        self.pages, self.verdict = pages, verdict

    def page(self, namespace: str, start: bytes, sizes: bool) -> tuple[list[Any], bytes]:
        at = int(start or b"0")
        return self.pages[at], b"%d" % (at + 1) if at + 1 < len(self.pages) else b""

    def use_keys(self, paths: list[str]) -> None:
        assert paths == []

    def written(self, record: Any) -> float:
        return 0.0

    def verify(self, record: Any, repair: bool) -> tuple[str, str, bool]:
        return self.verdict

    def remove(self, records: list[Any]) -> tuple[int, int, str]:
        return len(records), sum(record.size for record in records), ""


def root_of(records: Any) -> remote_root.RemoteRoot:
    return remote_root.RemoteRoot(records, "redis://h")


def nobody(done: int, total: int | None) -> None:
    pass


def test_endless_namespaces_are_counted_but_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_root, "_MOST_NAMESPACES", 3)
    page = [record_of(number, namespace_id=f"{number:064x}") for number in range(10)]
    others = [record_of(number, namespace_id="", key="") for number in range(30)]
    report = root_of(Scripted([page, page, others])).stat()
    assert (report["records"], len(report["namespaces"])) == (20, 3)
    assert report["records_of_further_namespaces"] == 14
    assert (report["others"], len(report["other_names"])) == (30, 10)


def test_endless_damage_ends_the_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_root, "_MOST_DAMAGED", 4)
    records = Scripted([[record_of(number) for number in range(10)]], ("corrupt", "bad", True))
    damaged = root_of(records).verify(True, nobody)
    assert [bad["removed"] for bad in damaged] == [True] * 4 + [False]
    assert "run it again" in damaged[-1]["message"]


def test_a_server_read_error_is_not_damage() -> None:
    records = Scripted([[record_of(number) for number in range(20)]], ("timeout", "no answer", False))
    with pytest.raises(RuntimeError, match="redis://h: no answer"):
        root_of(records).verify(False, nobody)
    records = Scripted([[record_of(number) for number in range(3)]], ("timeout", "no answer", False))
    assert [bad["kind"] for bad in root_of(records).verify(False, nobody)] == ["timeout"] * 3
    gone = Scripted(
        [[record_of(number) for number in range(20)]], ("not_found", "it no longer exists", False)
    )
    assert root_of(gone).verify(False, nobody) == []


def test_records_of_another_version_are_not_server_failures() -> None:
    page = [[record_of(number) for number in range(20)]]
    verdict = ("unavailable", "record version 9 is not supported by this release", False)
    assert len(root_of(Scripted(page, verdict)).verify(False, nobody)) == 20
    records = Scripted(page)
    verdicts = iter([verdict] * 6 + [("timeout", "no answer", False)] * 14)
    records.verify = lambda record, repair: next(verdicts)  # type: ignore[method-assign]
    damaged = root_of(records).verify(False, nobody)
    assert [bad["kind"] for bad in damaged[:6]] == ["unavailable"] * 6
    assert damaged[-1]["message"] == "ended early: no answer"


def test_an_address_without_records_is_reported() -> None:
    empty, filled = root_of(Scripted([[], []])), root_of(Scripted([[], [record_of(1)]]))
    assert empty.purge(None) == (0, 0)
    assert "no records under redis://h" in empty.notes()[0]
    assert filled.purge(None) == (1, 10)
    assert filled.notes() == []
    assert empty.purge("ab" * 32) == (0, 0)


def test_removals_before_a_server_failure_are_reported() -> None:
    records = Scripted([[record_of(number) for number in range(20)]])
    verdicts = iter([("corrupt", "bad", True)] * 6 + [("timeout", "no answer", False)] * 14)
    records.verify = lambda record, repair: next(verdicts)  # type: ignore[method-assign]
    damaged = root_of(records).verify(True, nobody)
    assert sum(bad["removed"] for bad in damaged) == 6
    assert (damaged[-1]["path"], damaged[-1]["message"]) == ("redis://h", "ended early: no answer")


def failing_page(number: int) -> Scripted:
    class Failing(Scripted):
        def page(self, namespace: str, start: bytes, sizes: bool) -> tuple[list[Any], bytes]:
            if int(start or b"0") == number:
                raise RuntimeError("io: gone")
            return super().page(namespace, start, sizes)

    return Failing([[record_of(number) for number in range(4)]] * 5, ("corrupt", "bad", True))


def test_a_failed_page_does_not_hide_removals() -> None:
    with pytest.raises(RuntimeError, match=r"redis://h: io: gone \(8 records were removed before\)"):
        root_of(failing_page(2)).purge(None)
    assert [bad["removed"] for bad in root_of(failing_page(2)).verify(True, nobody)] == [True] * 8 + [False]
    with pytest.raises(RuntimeError, match="io: gone"):
        root_of(failing_page(0)).verify(True, nobody)


@pytest.mark.parametrize("circle", [1, 2, 3, 7, 100])
def test_circular_pages_end(circle: int) -> None:
    class Circle(Scripted):
        def page(self, namespace: str, start: bytes, sizes: bool) -> tuple[list[Any], bytes]:
            at = int(start or b"0")
            asked.append(at)
            assert len(asked) < 5000, "followed for ever"
            return [], b"%d" % (at + 1 if at < 20 + circle else 21)

    asked: list[int] = []

    with pytest.raises(RuntimeError, match="the server keeps listing the same pages"):
        root_of(Circle([])).stat()
    assert root_of(Scripted([[record_of(number)] for number in range(200)])).stat()["records"] == 200


def test_threads_do_not_run_ahead_of_a_caller_that_stops() -> None:
    """Results beyond that point would be lost, and a removal may be among them."""
    records = Scripted([[record_of(number) for number in range(1000)]])
    records.takes_threads = True
    asked: list[Any] = []

    def verify(record: Any, repair: bool) -> tuple[str, str, bool]:
        asked.append(record)
        return "timeout", "no answer", False

    records.verify = verify  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no answer"):
        root_of(records).verify(True, nobody)
    assert len(asked) < 50


def test_ambiguous_namespaces_need_all_their_digits() -> None:
    known, further = "3f" + "0" * 62, "3f" + "1" * 62
    report = {"namespaces": [{"id": known}], "records_of_further_namespaces": 1}
    with pytest.raises(ValueError, match="give all 64 digits"):
        root_commands.full_id(report, "3f")
    assert root_commands.full_id(report, further) == further
    assert root_commands.full_id({"namespaces": [{"id": known}]}, "3f") == known


def test_the_confirmation_counts_the_records_to_remove(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_root, "_MOST_NAMESPACES", 1)
    page = [record_of(number, namespace_id=f"{number:064x}") for number in range(5)]
    root = root_of(Scripted([page]))
    monkeypatch.setattr(root_commands, "open_root", lambda place, changes=False: root)
    asked = CliRunner().invoke(app, ["purge", "redis://h"], input="n\n").output
    assert "Remove 5 records (50 B, more than 1 namespace)" in asked
    assert "4 records in further namespaces" in run("stat", "redis://h").output


def test_an_empty_tier_is_not_reported_as_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(root_commands, "open_root", lambda place, changes=False: root_of(Scripted([[]])))
    said = run("verify", "redis://h").output
    assert "no records at redis://h" in said
    assert "all good" not in said


def test_noncurrent_versions_do_not_count_as_free() -> None:
    records = Scripted([[record_of(number) for number in range(20)]])
    records.keeps_versions = records.takes_threads = True
    root = root_of(records)
    assert root.purge(None) == (20, 0)
    (note,) = root.notes()
    assert "keeps versions" in note
    assert "200 B" in note
