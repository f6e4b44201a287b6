# SPDX-License-Identifier: Apache-2.0
"""Explains why little or nothing was loaded, from a server's metrics or its log.

Importing this module loads neither the C++ core nor vLLM. Names of metrics: csrc/metrics/definitions.cc;
lines of the log: specs/ (a test makes each of them with the code that logs it).
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kv_offload.sizes import format_bytes

if TYPE_CHECKING:
    from kv_offload.exposition import Page

_SMALLEST_SHARE = 0.01  # share of missed tokens below which a reason is not reported
_STUCK_SECONDS = 10.0
_MANY_DROPPED = 0.05  # share of the bytes to be written

HOST_MEMORY = "cpu"  # the label of host memory among the tiers
_DIFFERENT_EPOCHS = (
    "start the stores that do not respond or refuse writes: the hosts then begin a new, empty epoch. If the "
    "write_policy is read_only, start or restart a server that writes"
)
_NOT_WRITTEN = (
    "the tier is full, or too slow for all new chunks: set write_policy reuse:2, or use a faster device"
)
_NO_ROW = (
    "loads, and writes to a tier too slow for all new chunks, occupied all of host memory: raise "
    "cpu_bytes_to_use, or give the slow tier write_policy reuse:2"
)

# Meaning and remedy of each reason in kv_offload_miss_tokens_total.
REASONS = {
    "not_stored": (
        "no chunk of these tokens had been stored before",
        "normal for new prompts. To hit, a prompt must begin with the same tokens as an earlier one, for at "
        "least a whole chunk, with the same cache_salt, LoRA adapter and images. After a restart the "
        "namespace must be the same (kv-offload stat ROOT) and the hash seed fixed (sha256, or "
        "PYTHONHASHSEED set)",
    ),
    "evicted": (
        "the chunks were stored, and evicted before they were requested again",
        "raise cpu_bytes_to_use or max_bytes; kv-offload replay shows what a larger cache would hit",
    ),
    "recompute_cheaper": (
        "loading was estimated to take longer than computing, so they were computed",
        "load_policy auto decided this. If the estimate is wrong: measure the disk with kv-offload bench, "
        "use larger records (blocks_per_chunk), or force it with load_policy always",
    ),
    "deadline": (
        "the tier did not deliver within lookup_timeout_ms",
        "the tier is slow or stuck: check kv_offload_oldest_op_seconds and the device",
    ),
    "corrupt": (
        "records failed their checksums; they were removed and the tokens computed",
        "check the device or the server: it returned corrupt data; for a root, run kv-offload verify",
    ),
    "incomplete": (
        "vLLM offered the chunks without some of their blocks, so they were not stored",
        "set blocks_per_chunk so that a chunk is not longer than the model's sliding window",
    ),
    "io_error": (
        "records could not be read or looked up, or the tier was out of service",
        "check kv_offload_failures_total by kind, the device or the server, and the permissions of the root",
    ),
    "pressure": (
        "host memory had no space for the chunks to read",
        "raise cpu_bytes_to_use: all tier reads pass through it",
    ),
    "host_lost": (
        "a host of this engine's ranks was not connected, so nothing was loaded",
        "check kv_offload_lost_hosts, the log and the network between the hosts; the host is used again when "
        "it is connected",
    ),
    "disabled": (
        "loading is disabled for these tokens",
        "load_policy is never, or requests say so in kv_transfer_params (kv_offload_load_policy, "
        "kv_offload_skip_load)",
    ),
}


# Remedy for each kind in kv_offload_failures_total.
FAILURE_KINDS = {
    "corrupt": "run kv-offload verify on the root, and check the device or the server",
    "io": "check the device and the permissions of the root; for a server, run kv-offload doctor",
    "no_space": "free space on the file system, or lower max_bytes; on a Redis server, set maxmemory-policy",
    "timeout": "check whether the device hangs or is overloaded",
    "device": "see the log of the workers: copies to or from the device failed",
    "exception": "check whether the host is out of memory; the tier is not used until a reset succeeds",
}


@dataclass(frozen=True)
class Finding:
    """One reason why tokens are not loaded. ``cause``: a word for scripts; ``tokens``: the number missed for
    it, if known."""

    cause: str
    text: str
    advice: str
    tokens: int | None = None


@dataclass(frozen=True)
class Diagnosis:
    """The findings, largest cause first. Tokens count from the start of the server or of the log."""

    hit_tokens: int
    miss_tokens: int
    stored_tokens: int | None  # None: not known (a log)
    findings: tuple[Finding, ...]

    @property
    def verdict(self) -> str:
        """One sentence."""
        asked = self.hit_tokens + self.miss_tokens
        if self.hit_tokens:
            return (
                f"{self.hit_tokens:,} of {asked:,} tokens that were looked up were loaded ({_share(self)})."
            )
        if asked:
            return f"Nothing was loaded: {asked:,} tokens were looked up and all were missed."
        return "Nothing was loaded: no tokens were looked up."


def _share(found: Diagnosis) -> str:
    return f"{100 * found.hit_tokens / (found.hit_tokens + found.miss_tokens):.1f}%"


def from_metrics(page: "Page") -> Diagnosis:
    """Diagnoses a metrics page."""

    def total(name: str, **labels: str) -> int:
        return round(page.sum(f"kv_offload_{name}", **labels))

    missed = Counter(
        {
            reason: total("miss_tokens_total", reason=reason)
            for reason in page.values_of("kv_offload_miss_tokens_total", "reason")
        }
    )
    hits, stored = total("hit_tokens_total"), total("stored_tokens_total")
    held = total("tier_chunks")
    findings: list[Finding] = []
    if not hits and not stored and not held:
        findings.append(_nothing_stored())
    if not hits and not missed.total():
        findings.append(_nothing_looked_up())
    findings += _missed(missed, _estimates(page), total("tier_capacity_tokens"))
    findings += _tiers(page)
    findings += _epochs(page)
    findings += _hosts(page)
    return Diagnosis(hits, missed.total(), stored, tuple(findings))


def _nothing_stored() -> Finding:
    return Finding(
        "nothing_stored",
        "nothing has been stored yet, so there is nothing to load",
        "prompts must be longer than a chunk (vLLM's block size times blocks_per_chunk), and vLLM's prefix "
        "caching must be on; kv_offload_skip_store in kv_transfer_params forbids storing",
    )


def _nothing_looked_up() -> Finding:
    return Finding(
        "nothing_looked_up",
        "no prompt needed more than vLLM's own cache holds on the device",
        "either there was no request yet, or prompts are shorter than a chunk, or the device's cache serves "
        "all of them, which leaves nothing to gain",
    )


def _missed(missed: Counter[str], estimates: str, capacity: int) -> Iterator[Finding]:
    total = missed.total()
    for reason, tokens in missed.most_common():
        if not tokens or tokens < _SMALLEST_SHARE * total:
            continue
        meaning, advice = REASONS.get(
            reason, ("a reason that this version does not know", "upgrade kv-offload")
        )
        if reason == "recompute_cheaper" and estimates:
            meaning += f" ({estimates})"
        if reason == "evicted" and capacity:
            meaning += f"; host memory and tiers together hold {capacity:,} tokens"
        text = f"{tokens:,} tokens ({100 * tokens / total:.1f}% of those missed): {meaning}"
        yield Finding(reason, text, advice, tokens)


def _estimates(page: "Page") -> str:
    """Returns the average estimates behind decisions to compute."""
    count = page.sum("kv_offload_decisions_total", choice="recompute")
    load, compute = (
        page.sum("kv_offload_estimated_seconds_total", choice="recompute", side=side)
        for side in ("load", "compute")
    )
    if not count or not load or not compute:
        return ""
    return f"on average {load / count:.2f} s against {compute / count:.2f} s"


def _tiers(page: "Page") -> Iterator[Finding]:
    for tier in page.values_of("kv_offload_tier_capacity_bytes", "tier"):
        trips = round(page.sum("kv_offload_breaker_trips_total", tier=tier))
        if trips:
            times = "once" if trips == 1 else f"{trips} times"
            yield Finding(
                "tier_off",
                f"tier {tier} was taken out of service {times} after errors or timeouts; meanwhile nothing "
                "was read from it or written to it",
                "check kv_offload_failures_total by kind and the device",
            )
        yield from _removed(page, tier)
        kinds = {
            kind: number
            for kind in page.values_of("kv_offload_failures_total", "kind")
            if (number := round(page.sum("kv_offload_failures_total", tier=tier, kind=kind)))
        }
        if kinds:
            counted = ", ".join(f"{number:,} {kind}" for kind, number in kinds.items())
            advice = dict.fromkeys(FAILURE_KINDS.get(kind, "see the server's log") for kind in kinds)
            yield Finding("failures", f"operations of tier {tier} failed: {counted}", "; ".join(advice))
        oldest = page.max("kv_offload_oldest_op_seconds", tier=tier)
        if oldest > _STUCK_SECONDS:
            yield Finding(
                "stuck",
                f"an operation of tier {tier} has been waiting for {oldest:.0f} s",
                "the device hangs or is overloaded; requests continue without it",
            )
        dropped = page.sum("kv_offload_dropped_bytes_total", tier=tier)
        dropped -= page.sum(
            "kv_offload_dropped_bytes_total", tier=tier, reason="declined"
        )  # no problem found
        is_host_memory = tier == HOST_MEMORY
        written = (
            page.sum("kv_offload_stored_bytes_total")
            if is_host_memory
            else page.sum("kv_offload_write_bytes_total", tier=tier)
        )
        if dropped > _MANY_DROPPED * (dropped + written):
            share = 100 * dropped / (dropped + written)
            place = "stored in host memory" if is_host_memory else f"written to tier {tier}"
            yield Finding(
                "not_stored_in_memory" if is_host_memory else "not_written",
                f"{share:.0f}% of the bytes that were to be {place} were dropped",
                _NO_ROW if is_host_memory else _NOT_WRITTEN,
            )


def _epochs(page: "Page") -> Iterator[Finding]:
    """Names the tiers of an engine on several hosts that are out of service for different epochs."""
    usable = "kv_offload_host_tier_usable"
    for tier in page.values_of(usable, "tier"):
        known = [
            each for each in page.labels(usable) if each.get("tier") == tier and each.get("op") == "epoch"
        ]
        hosts = sorted({each.get("host", "") for each in known}, key=lambda host: (len(host), host))
        differing = [host for host in hosts if not page.min(usable, host=host, tier=tier, op="epoch")]
        if differing:
            yield Finding(
                "different_epochs",
                f"tier {tier} is out of service on all hosts: the stores of hosts {', '.join(differing)} "
                "respond, but have different epochs, because one lost its keys or missed a reset, or several "
                "engines started while a store did not respond",
                _DIFFERENT_EPOCHS,
            )


def _hosts(page: "Page") -> Iterator[Finding]:
    """Names the hosts of an engine on several hosts that are lost, or whose part of a tier fails."""
    for host in page.values_of("kv_offload_host_connected", "host"):
        if not page.min("kv_offload_host_connected", host=host):
            yield Finding(
                "host_not_connected",
                f"host {host} was not connected in the last step; nothing is loaded or stored until it is",
                "check its processes and the network to it; the scheduler's log has the reason",
            )
    for host in page.values_of("kv_offload_host_tier_capacity_bytes", "host"):
        for tier in page.values_of("kv_offload_host_tier_capacity_bytes", "tier"):
            failed = page.sum("kv_offload_host_failures_total", host=host, tier=tier)
            trips = page.sum("kv_offload_host_breaker_trips_total", host=host, tier=tier)
            if not failed and not trips:
                continue
            parts = [f"{failed:,.0f} operations on its part of tier {tier} failed"] if failed else []
            if trips:
                parts.append(f"the circuit breaker of its part of tier {tier} tripped {trips:,.0f} times")
            yield Finding(
                "host_failures",
                f"host {host}: {' and '.join(parts)}",
                "check the device or the server of that host, and its log",
            )


def _removed(page: "Page", tier: str) -> Iterator[Finding]:
    """Reports files that other programs removed from the directory of a tier."""
    rebuilds = round(page.sum("kv_offload_tier_rebuilds_total", tier=tier))
    lost = round(page.sum("kv_offload_tier_lost_bytes_total", tier=tier))
    if not rebuilds and not lost:
        return
    parts = []
    if rebuilds:
        times = "once" if rebuilds == 1 else f"{rebuilds:,} times"
        parts.append(f"removed its directory or files that it needs, which the server recreated ({times})")
    if lost:
        parts.append(f"removed {format_bytes(lost)} of its records")
    yield Finding(
        "removed_by_others",
        f"another program changed tier {tier}: it {' and '.join(parts)}",
        "let max_bytes limit the directory instead of a clean-up job; to empty it, use kv-offload purge",
    )


# ---- a log

_NEVER_HIT = re.compile(r"none was ever hit: of (\d+) tokens looked up, (\d+) missed \((\w+)\): (.*)")
_REQUEST_MISSED = re.compile(r"(\d+) tokens missing \((\w+)\)")
_REQUEST_HIT = re.compile(r"(\d+) tokens from \w")
_BOOT = re.compile(r"kv-offload \S+(?: engine \d+ of \d+)?: cpu .* tokens")
_PLUGIN_LINE = re.compile(
    r"kv[-_]offload|KVOffload|kv_transfer_params|kv_connector_extra_config|KV chunks are stored",
    re.IGNORECASE,
)
_PROBLEMS = re.compile(r"kv_connector_extra_config has (?:a problem|\d+ problems):")
# Lines that name one cause each: pattern, cause, remedy. The line itself is the text.
_LINES = (
    (
        re.compile(r"enable_prefix_caching=False"),
        "prefix_caching_off",
        "vLLM's prefix caching is off, so nothing can be looked up: remove --no-enable-prefix-caching",
    ),
    (
        re.compile(r"PYTHONHASHSEED"),
        "random_seed",
        "set PYTHONHASHSEED to the same value for every start, or use --prefix-caching-hash-algo sha256",
    ),
    (
        re.compile(r"kv_transfer_params: .* is (ignored|rejected)"),
        "ignored_hint",
        "correct what the client sends in kv_transfer_params",
    ),
    (
        re.compile(r"max_bytes is .*file system can hold"),
        "disk_too_small",
        "lower max_bytes or free space: writes are dropped when the file system is full",
    ),
    (
        re.compile(r"canonical_layout is not possible here"),
        "other_layout",
        "another tensor-parallel size does not find these records; keep it the same, or remove the reason",
    ),
    (
        re.compile(r"tier \S+ stays out of service: the stores of hosts"),
        "different_epochs",
        _DIFFERENT_EPOCHS,
    ),
    (
        re.compile(r"tier \S+ is out of service: the store does not respond on"),
        "store_does_not_respond",
        "start the Redis server or the store of the named host, or correct the network; the tier is then "
        "used without a restart",
    ),
    (
        re.compile(r"KVOffloadSpec supports vLLM"),
        "vllm_not_supported",
        "install a release that kv-offload doctor names as supported",
    ),
)


def from_log(lines: Iterable[str]) -> Diagnosis:
    """Diagnoses the log of a server. With VLLM_LOGGING_LEVEL=DEBUG it has a line for each request."""
    findings: dict[tuple[str, str], Finding] = {}
    missed: Counter[str] = Counter()
    hits, ours, booted, in_problems = 0, False, False, False
    for line in lines:
        line = line.rstrip()
        ours = ours or _PLUGIN_LINE.search(line) is not None
        booted = booted or _BOOT.search(line) is not None
        # A list of problems has one per line, until a line that is none.
        if in_problems and (listed := re.search(r"^\s*(?:\S+ )*?\s*- (.+)$", line)):
            finding = Finding(
                "refused", listed.group(1), "correct the configuration: kv-offload doctor checks it"
            )
        elif never := _NEVER_HIT.search(line):
            asked, tokens, reason, cause = never.groups()
            missed_of = f"{int(tokens):,} of {int(asked):,} tokens"
            text = f"chunks are stored, but none was ever hit; {missed_of} were missed as {reason}"
            finding = Finding(reason, text, cause, int(tokens))
        elif matched := next((entry for entry in _LINES if entry[0].search(line)), None):
            finding = Finding(matched[1], _message(line), matched[2])
        else:
            in_problems = _PROBLEMS.search(line) is not None
            hits += sum(int(tokens) for tokens in _REQUEST_HIT.findall(line))
            for tokens, reason in _REQUEST_MISSED.findall(line):
                missed[reason] += int(tokens)
            continue
        findings.setdefault((finding.cause, finding.text), finding)  # the first of equal lines
    found = [*findings.values(), *_missed(missed, "", 0)]
    if not ours:
        found.insert(0, _plugin_not_found())
    elif not booted and "refused" not in {finding.cause for finding in found}:
        found.append(_no_boot_line())
    return Diagnosis(hits, missed.total(), None, tuple(found))


def _plugin_not_found() -> Finding:
    return Finding(
        "not_in_use",
        "no line of this log is from kv-offload",
        "serve with spec_name KVOffloadSpec in --kv-transfer-config (kv-offload config writes it), or give "
        "the log from its beginning",
    )


def _no_boot_line() -> Finding:
    return Finding(
        "no_boot_line",
        "the line that names tiers and capacities at start is missing",
        "give the log from its beginning, or look for the error that kept the server from starting",
    )


def _message(line: str) -> str:
    """A line without vLLM's prefix: (process) LEVEL date time [file:line]."""
    return re.sub(r"^(?:\([^)]*\) )?(?:[A-Z]+ )?(?:\d\d-\d\d )?(?:[\d:]+ )?(?:\[[^\]]*\] )?", "", line)
