// Tier: a place below host memory that keeps records. Batched asynchronous
// verbs; every op ends in exactly one Completion carrying one Status.
//
// The tier owns its catalogue (which keys it holds, their sizes and order of
// eviction), its bound (max_bytes, never exceeded: space is reserved before a
// write) and its threads. The rows behind an op's shards are the op's until its
// completion was polled, and the op keeps their memory mapped (TierOp::memory) for
// as long as a thread may touch it, be that after close(). No callback ever runs on
// a tier's thread: results are polled by the caller's thread.
//
// Threads: submit, cancel, poll, contains, prefetch_presence, touch, used, reset, stats may
// be called from one thread (the scheduler's); the tier's own threads are inside.
//
// tests/cpp/storage/tier_conformance_test.cc holds every kind of tier to what is said here.
#pragma once

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

namespace kv_offload {

using OpId = std::uint64_t;

enum class OpKind : std::uint8_t { kRead, kWrite };

struct TierOp {
  OpId id = 0;  // chosen by the caller, unique among its ops in flight
  OpKind kind = OpKind::kRead;
  ChunkKey key;
  std::uint32_t group = 0;  // group position, stored in the record and checked
  EntryInfo about;          // for the tier's eviction policy
  // The chunk's shards, one or more per area with bytes, page-aligned; the record's
  // payload is their concatenation, each padded to 4 KiB. The bytes behind a
  // shard up to the next 4 KiB are part of the row: a write makes them zero, a
  // read fills them. Read: filled and verified before the op completes ok;
  // garbage on failure. An op that is stuck in the kernel does NOT complete
  // until the kernel lets go of the memory, whatever its deadline, and not at
  // all when the tier was closed meanwhile: until then the row stays the op's.
  std::vector<Shard> shards;
  // What the shards lie in. Shared by the op until no thread can touch them any more.
  std::shared_ptr<const void> memory{};
  // Absolute time after which the op is not started any more (kExpired). 0 = none.
  Nanos deadline{0};
  // A write: kDeclined rather than take the place of a record of the same request (about.request). For what
  // was just stored: the end of a prompt is not worth its beginning.
  bool may_decline = false;
};

// A request used a chunk in host memory: as much as a read of its record would say.
struct TierUse {
  ChunkKey key;
  EntryInfo about;
};
using TierUses = std::shared_ptr<const std::vector<TierUse>>;

struct Completion {
  OpId id = 0;
  OpKind kind = OpKind::kRead;
  ChunkKey key;
  Status status;
  std::uint64_t bytes = 0;  // payload moved when ok
  double seconds = 0;       // start to end on the device, queue time not included
  double queued_seconds = 0;
};

// What is known of several keys by the order that they are given in.
enum class KeyOrder : std::uint8_t {
  kNone,    // nothing
  kPrefix,  // chunks of one prompt, from the left: none is stored or of use without those before it
};

enum class Presence : std::uint8_t {
  kAbsent,
  kPresent,
  kUnknown,    // until it is asked for
  kAsked,      // unknown, and being asked for: there is nothing to do but to wait
  kWasAbsent,  // when it was last asked for, a while ago: worth asking again, for who has not asked yet
};

// Why a key the tier once held is gone; for events and miss reasons.
struct TierRemoval {
  ChunkKey key;
  enum class Reason : std::uint8_t { kEvicted, kCorrupt, kVanished, kReset } reason = Reason::kEvicted;
};

struct TierStats {
  std::uint64_t bytes = 0;           // on the root, all of it: records, temporaries, old namespaces
  std::uint64_t capacity_bytes = 0;  // max_bytes
  std::uint64_t chunks = 0;          // records in the catalogue of this namespace
  std::uint64_t evicted_bytes = 0;   // running total
  std::uint64_t direct_ops = 0, buffered_ops = 0;     // O_DIRECT used or not
  std::uint32_t queued_reads = 0, queued_writes = 0;  // waiting or running
  double oldest_read_seconds = 0, oldest_write_seconds = 0;
  bool names_complete = false;  // after a start: all that is there is known
  bool scan_complete = false;   // and the order of its use, and its bytes
  bool readable = true;         // reads would be taken now: on, or due for a try
  bool writable = true;         // the same of writes
  bool is_shared = true;        // others may write what we would find: not after a reset of our own
  bool apart = false;  // another process was reset and we were not: we no longer share records with it
  // Of a directory: how often something that another program removed (the root, a directory or file in it)
  // was made again, and bytes of files that another program removed. Totals.
  std::uint64_t rebuilds = 0, lost_bytes = 0;
  std::uint64_t breaker_trips = 0;
  // Ops that ran for longer than the tier allows, each once, ended since or not.
  std::uint64_t read_timeouts = 0, write_timeouts = 0;
  // Running totals of what ops that ended well moved on the tier: header, encoded payload, padding.
  std::uint64_t read_record_bytes = 0, written_record_bytes = 0;
  // Of a tier that may encode its records (compression_choice.h); totals.
  bool may_encode = false, encodes = false;  // ever; the next one
  double encode_seconds = 0, decode_seconds = 0;
  std::uint64_t encoded_raw_bytes = 0, encoded_stored_bytes = 0;  // records that were encoded: before, after
};

class Tier {
 public:
  virtual ~Tier() = default;                  // closes
  virtual std::string_view name() const = 0;  // the label: "fs"

  // Takes all ops or (closing) completes them with kUnavailable; never blocks
  // on storage. Ops are served in order within a kind; reads go before writes.
  // An op belongs to the time between two resets in which it was submitted: it
  // neither finds nor leaves a record in another, however late it runs.
  virtual void submit(std::vector<TierOp> ops) = 0;
  // Give up a queued op that has not started: true, and it completes kCancelled.
  // False when it runs or is done (its completion comes or came as usual).
  virtual bool cancel(OpId id) = 0;
  // Appends finished ops and removals since the last call. Never blocks.
  virtual void poll(std::vector<Completion>* completions, std::vector<TierRemoval>* removals) = 0;

  // Is a complete record of this key here, as far as is known on this side, whether
  // or not it would be read now (TierStats::readable). O(1), starts nothing. Neither unknown
  // nor being asked for while reads are switched off: nobody would answer.
  virtual Presence contains(const ChunkKey& key) const = 0;
  // Of a key that contains() said kWasAbsent of, before it is asked for: it is unknown from now on, so that
  // nobody takes what was known for the answer. O(1).
  virtual void forget_absence(const ChunkKey&) {}
  // Asks, behind, for those of the keys that are unknown and are not being asked for
  // yet; contains() says kAsked of them when a thread has taken them up, and knows
  // them soon, found or not. Never blocks.
  virtual void prefetch_presence(std::vector<ChunkKey> keys, KeyOrder order) = 0;
  // Recency: the key was in use elsewhere until now.
  virtual void touch(const ChunkKey& key) = 0;
  // Of a step, oldest first. O(1): taken up behind, before anything is evicted. A tier that keeps no order of
  // its own has no use for it.
  virtual void used(const TierUses&) {}
  // Forget everything: from this call on no older record is found again by
  // anybody who starts later or by us; the bytes are reclaimed behind. What is
  // written after it is of this process's memory (new weights, in place): nobody
  // who starts later finds it. Not ok: the
  // tier could not yet make sure of those who start later. It has forgotten all the
  // same, goes on trying, and takes no records (kUnavailable, writable is false)
  // until it has; nothing is needed of the caller. One that others fill may not be
  // able to: it then has nothing more for this process.
  virtual Status reset() = 0;
  virtual TierStats stats() const = 0;
  // Whether records are encoded now, and why: a text for people. Empty: they never are.
  virtual std::string about_codec() const { return {}; }
  // Refuse new ops, cancel what is queued, finish what runs, join. Idempotent;
  // poll() still hands out what completed. A thread that does not come back in
  // a bounded time (a hung mount) is let go, with shared ownership of all of the
  // tier that it touches: the row of an op that has not completed after close()
  // may still be written and must not be freed or reused.
  virtual void close() = 0;

  // Is this op's device busy or slow: estimated seconds until a read of `bytes`
  // submitted now would complete (queue included); 0 when unknown.
  virtual double estimate_read_seconds(std::uint64_t bytes) const = 0;
};

}  // namespace kv_offload
