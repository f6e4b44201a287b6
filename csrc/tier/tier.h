// SPDX-License-Identifier: Apache-2.0
// Tier: a storage level below host memory that keeps records. Batched asynchronous verbs; every op ends in
// exactly one Completion with one Status.
//
// The tier owns its catalog (keys, sizes, eviction order), its bound (max_bytes, never exceeded: space is
// reserved before a write) and its threads. An op owns the rows of its shards until its completion was
// polled. It keeps their memory mapped (TierOp::memory) as long as a thread may touch it, even after close().
// No callback ever runs on a tier's thread: the caller's thread polls for results.
//
// Threads: only one thread (the scheduler's) may call submit, cancel, poll, contains, prefetch_presence,
// touch, used, reset, stats and availability. Any thread may call has_removals, until close(). The tier's own
// threads are internal.
//
// tests/cpp/tier/tier_conformance_test.cc checks this contract for every kind of tier.
#pragma once

#include <array>
#include <cerrno>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "base/types.h"
#include "policy/eviction_policy.h"
#include "record/record_op.h"

namespace kv_offload {

using OpId = std::uint64_t;

struct TierOp : RecordOp {
  OpId id = 0;  // chosen by the caller, unique among its ops in flight
  OpKind kind = OpKind::kRead;
  EntryInfo entry_info;  // input of the tier's eviction policy
  // Position of the chunk's row in each area, for a tier that also moves the parts of other hosts
  // (hosts/all_hosts_tier.h).
  RowId row = kNoRow;
  // The memory that holds the shards. The op shares ownership until no thread can touch the shards.
  std::shared_ptr<const void> memory{};
  // Absolute time after which the op is not started and completes kExpired. 0 = none.
  Nanos deadline{0};
  // Part of the tier's bandwidth that the tenant (entry_info.tenant) gets while others wait too. Above 0.
  double weight = 1;
  // Write: complete with kDeclined rather than evict a record of the same request (entry_info.request). Set
  // for chunks that were just stored: the end of a prompt is not worth evicting its beginning.
  bool may_decline = false;
  // Write of a whole record: when it was last used, in unix nanoseconds. A tier that stores times of use
  // keeps it as the record's. 0: now.
  std::int64_t used_unix_nanos = 0;
};

// A request used a chunk in host memory. Counts for recency like a read of its record.
struct TierUse {
  ChunkKey key;
  EntryInfo entry_info;
};
using TierUses = std::shared_ptr<const std::vector<TierUse>>;

struct Completion {
  OpId id = 0;
  OpKind kind = OpKind::kRead;
  ChunkKey key;
  Status status;
  std::uint64_t bytes = 0;  // payload bytes moved when ok
  double seconds = 0;       // start to end on the device, without queue time
  double queued_seconds = 0;
};

// Returns the status of an op that ended because a host of the engine is lost (hosts/remote_tier.h):
// kUnavailable with this errno, which no other tier uses with kUnavailable.
inline Status host_lost_error() {
  return Status::error(StatusKind::kUnavailable, "a host is lost", ENOTCONN);
}
inline bool is_host_lost(const Status& status) {
  return status.kind() == StatusKind::kUnavailable && status.error_number() == ENOTCONN;
}

// Meaning of the order of a list of keys.
enum class KeyOrder : std::uint8_t {
  kNone,    // nothing
  kPrefix,  // chunks of one prompt, from the left: a chunk is not stored or usable without those before it
};

// The order of the keys of a lookup, and for whom they are looked up.
struct LookupOptions {
  LookupOptions(KeyOrder key_order, TenantId by = 0, double part = 1)  // NOLINT: implicit
      : order(key_order), tenant(by), weight(part) {}
  KeyOrder order;
  TenantId tenant;
  double weight;  // see TierOp::weight. Above 0
  bool operator==(const LookupOptions&) const = default;
};

enum class Presence : std::uint8_t {
  kAbsent,
  kPresent,
  kUnknown,        // not looked up yet
  kLookupPending,  // a lookup is pending: the caller can only wait
  // Absent when last looked up, a while ago. A caller that has not asked yet should ask again.
  kStaleMiss,
  // The last lookup was that of a prompt (KeyOrder::kPrefix), and ended at an earlier key without an answer
  // for this one. To be looked up again if the earlier key is found elsewhere, else it is not needed.
  kSkipped,
  // The last lookup failed, or no lookup is possible now. Counts as absent, but the record may exist.
  kLookupFailed,
};

// True if a lookup of the key has to be started to know more.
inline bool must_ask(Presence presence) {
  return presence == Presence::kUnknown || presence == Presence::kStaleMiss || presence == Presence::kSkipped;
}

// Why a tier no longer holds a key; for events and miss reasons.
struct TierRemoval {
  ChunkKey key;
  enum class Reason : std::uint8_t { kEvicted, kCorrupt, kVanished, kReset } reason = Reason::kEvicted;
};

// Which epoch a tier opens, for engines whose hosts have a store each: their epochs have one random number,
// which is stored with them. Equal numbers mean that no host has missed a reset of another one.
struct EpochChoice {
  std::uint64_t id = 0;  // of an epoch that is made; 0: it gets none
  bool is_new = false;   // if set, a directory opens no epoch with another id
  // With is_new: the id that this host's tier reported before. A store that other engines use at the same
  // time begins the epoch `id` only in place of this one (epoch_registry.h).
  std::uint64_t replaces = 0;
  bool operator==(const EpochChoice&) const = default;
};

struct TierStats {
  std::uint64_t bytes = 0;           // used on the root in total: records, temporaries, old namespaces
  std::uint64_t capacity_bytes = 0;  // max_bytes
  std::uint64_t chunks = 0;          // records in this namespace's catalog
  // Bytes on the tier of each tenant's records in that catalog; empty without tenants, and for tiers that do
  // not divide their space.
  std::vector<std::uint64_t> tenant_bytes{};
  std::uint64_t evicted_bytes = 0;                    // running total
  std::uint64_t direct_ops = 0, buffered_ops = 0;     // with and without O_DIRECT
  std::uint32_t queued_reads = 0, queued_writes = 0;  // waiting or running
  double oldest_read_seconds = 0, oldest_write_seconds = 0;
  std::uint64_t epoch_id = 0;   // of the epoch in use, see EpochChoice; 0: it has none
  bool names_complete = false;  // the startup scan has found the names of all records
  bool scan_complete = false;   // the startup scan also knows their sizes and order of use
  bool readable = true;         // reads are accepted now: the breaker is closed or due for a probe
  bool writable = true;         // the same for writes
  bool is_shared = true;        // can find other processes' records: false after a reset of this one
  bool diverged = false;  // another process was reset and this one was not: they no longer share records
  // With ThreadPoolTierOptions::watch_removals: why removals by others are found only by reads. Empty: they
  // are found without reads, or the tier is not asked to.
  std::string removals_problem{};
  // File tiers: how often the tier recreated something that another program removed (the root, a directory or
  // a file in it), and the bytes of files that another program removed. Totals.
  std::uint64_t rebuilds = 0, lost_bytes = 0;
  std::uint64_t breaker_trips = 0;
  // Ops that ran longer than the tier allows. Each op counts once, also after it has ended.
  std::uint64_t read_timeouts = 0, write_timeouts = 0;
  // Bytes that successful ops moved on the tier: header, encoded payload, padding. Running totals.
  std::uint64_t read_record_bytes = 0, written_record_bytes = 0;
  // Tiers that can encode their records (compression_choice.h); totals.
  bool may_encode = false, encodes = false;  // ever; for the next record
  double encode_seconds = 0, decode_seconds = 0;
  std::uint64_t encoded_raw_bytes = 0, encoded_stored_bytes = 0;  // encoded records: size before and after
  double largest_key_error = 0, largest_value_error = 0;          // see CompressionStats
};

// The members of TierStats with the same names.
struct TierAvailability {
  bool readable = true, writable = true, is_shared = true;
};

// One host's part of a tier, in an engine on several hosts. Totals count from the start of the scheduler.
struct TierPart {
  TierStats stats;
  double read_bytes_per_second = 0;  // estimated, without the queue; 0: unknown
  std::uint64_t slowest_reads = 0;   // successful reads of chunks that took longest here
  // Reads and writes that ended here, by StatusKind. The chunk may have failed for another host's reason.
  std::array<std::uint64_t, kStatusKinds> reads{}, writes{};
  // The tier is out of service: the store of this host responds, and another host's store has another epoch.
  bool epoch_differs = false;
  // Removals of parts that became useless, by StatusKind. After a failed one, the part stays until it is
  // evicted or expires.
  std::array<std::uint64_t, kStatusKinds> removals{};
};

class Tier {
 public:
  virtual ~Tier() = default;                  // calls close()
  virtual std::string_view name() const = 0;  // the label, e.g. "fs"

  // Accepts all ops. A tier that is closing completes them with kUnavailable. Never blocks on storage. Ops
  // run in order within a kind; reads run before writes. An op belongs to the epoch (the time between two
  // resets) in which it was submitted. However late it runs, it neither finds nor leaves a record in another
  // epoch.
  virtual void submit(std::vector<TierOp> ops) = 0;
  // Cancels a queued op that has not started. Returns true if the op was still queued; it then completes
  // kCancelled. Returns false if it is running or done; its completion arrives as usual.
  virtual bool cancel(OpId id) = 0;
  // Appends the ops that finished and the keys that were removed since the last call. Never blocks.
  virtual void poll(std::vector<Completion>* completions, std::vector<TierRemoval>* removals) = 0;
  // True if poll() would report a removal, other than by a reset. For an idle engine, which does not poll.
  // Always false for tiers that learn of removals only by their own ops.
  virtual bool has_removals() const { return false; }

  // Returns whether a complete record of this key is here, as far as this process knows. The answer does not
  // depend on whether the record can be read now (TierStats::readable). O(1), starts no I/O. Never returns
  // kUnknown or kLookupPending while reads are out of service, since a lookup would get no answer; keys that
  // it does not know are kLookupFailed then.
  virtual Presence contains(const ChunkKey& key) const = 0;
  // Turns kStaleMiss or kSkipped of a key into kUnknown before the key is looked up again, so that no caller
  // takes the old result for the new one. O(1).
  virtual void forget_miss(const ChunkKey&) {}
  // Starts background lookups of those keys that are unknown and have no pending lookup. contains() returns
  // kLookupPending once a thread has picked a key up, and the answer (found or not) soon after. Never blocks.
  // Lookups of several tenants start in turn. A key that several tenants look up at the same time may be
  // looked up once, in the turn of the first of them.
  virtual void prefetch_presence(std::vector<ChunkKey> keys, const LookupOptions& options) = 0;
  // Recency: the key was in use elsewhere until now.
  virtual void touch(const ChunkKey& key) = 0;
  // The uses of one scheduler step, oldest first. O(1): applied in the background, before the next eviction.
  // A tier without its own eviction order ignores it.
  virtual void used(const TierUses&) {}
  // Invalidates all records: from this call on, neither this process nor any process started later finds an
  // older record. The bytes are reclaimed in the background. Records written after it hold data of this
  // process's memory (new weights, in place), so no process started later finds them either. Not ok: the tier
  // could not yet hide the records from processes started later. This process has still forgotten them. The
  // tier retries on its own and accepts no records (kUnavailable, writable is false) until it succeeds; the
  // caller does not need to retry. A tier that other processes fill may be unable to reset; it then serves no
  // more records to this process. `startup_id`: the id of the epoch for processes that start later, on all
  // hosts of the engine (EpochChoice); 0: the tier chooses one. Tiers whose epoch is made by the next process
  // that starts ignore it. Never pass the same id to two resets of a tier.
  virtual Status reset(std::uint64_t startup_id = 0) = 0;
  // Like reset(), but does not wait for the storage. If it has not confirmed yet, this is as if reset() had
  // failed. A tier whose reset() waits overrides it.
  virtual void begin_reset(std::uint64_t startup_id) { (void)reset(startup_id); }
  // Returns whether a reset can succeed. A tier that other processes fill (`read_only`) may be unable to.
  virtual bool can_reset() const { return true; }
  // Forgets which epoch the tier uses, without ending it. The tier has none (TierStats::epoch_id is 0) until
  // it has read the store's epoch for newly started processes again; it keeps that one. For a tier that
  // cannot reset, on an engine whose hosts have opened different epochs. Never waits. No effect after a
  // reset. REQUIRES: no op or lookup was submitted since the tier was opened.
  virtual void refresh_epoch() {}
  virtual TierStats stats() const = 0;
  // Returns what the scheduler needs of stats() in each step.
  virtual TierAvailability availability() const {
    const TierStats all = stats();
    return {all.readable, all.writable, all.is_shared};
  }
  // Returns the tiers of all hosts, the scheduler's first; empty for the tier of one host.
  virtual std::vector<TierPart> parts() const { return {}; }
  // Returns why the tier has had no epoch since it was opened, as text for people: how its store failed. Else
  // empty.
  virtual std::string epoch_problem() const { return {}; }
  // Returns whether records are encoded now, and why, as text for people. Empty if this tier never encodes
  // records.
  virtual std::string codec_reason() const { return {}; }
  // Refuses new ops, cancels queued ops, finishes running ops, joins the threads. Idempotent; poll() still
  // returns what completed. A thread that does not return in a bounded time (a hung mount) is detached and
  // shares ownership of all of the tier that it touches. The row of an op that has not completed after
  // close() may still be written to: do not free or reuse it.
  virtual void close() = 0;

  // Returns the estimated seconds until a read of `bytes` submitted now would complete, queue included; 0 if
  // unknown.
  virtual double estimate_read_seconds(std::uint64_t bytes) const = 0;
};

}  // namespace kv_offload
