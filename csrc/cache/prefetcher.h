// SPDX-License-Identifier: Apache-2.0
// Prefetcher: reads the prompts of sessions that are expected back from tiers into host memory, so that their
// next request need not wait for the tier.
//
// A prompt is read from its first chunk on, up to the first chunk of a full-attention group that no tier has:
// a request uses no chunk after it, of any group. Chunks in a neighbour's memory are not read. The reads
// begin before the expected return, early enough for the estimated speed of the tiers. When the engine runs
// out of requests, the prompts of the next kIdleHorizon are read at once, because no step follows until a
// request arrives.
//
// Bounds, because hints may be wrong:
// - A read takes a free row, or evicts a chunk that is expected later or of which nothing is expected. It
//   never evicts a chunk that is expected sooner, and cancels no write.
// - Unused prefetched chunks take at most max_bytes. One client gets half of that while other clients have
//   prompts or chunks here. One tenant gets its share, and what other tenants do not use or, if they have
//   prompts or chunks here, cannot claim as their shares. Chunks that are not used within kGrace of the
//   expected return are evicted first, and count against the bounds of their client and tenant for kPenalty.
// - At most kReadsInFlight reads run while requests run, so that the reads of requests hardly wait for them.
//   If a request arrives while more are queued, the others are cancelled and begin again when the prompt is
//   due.
//
// Order: the prompts of a tenant that return first are read first. A prompt that finds no room waits, and
// others are visited before it is visited again. Tenants take turns: prompts that are due get reads in
// proportion to the shares of their tenants, however many prompts of other tenants are due.
//
// Cost: run() examines at most kPromptsPerStep prompts and kChunksPerStep chunks, and checks whether as many
// other prompts are due, O(log n) each. Once no request is left, it examines more, because no request waits
// for it. Threads: one (the scheduler's).
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "cache/cache_types.h"
#include "cache/chunk_groups.h"
#include "cache/host_chunks.h"
#include "cache/planned_reads.h"
#include "cache/row_provider.h"
#include "cache/tier_io.h"
#include "metrics/metrics.h"
#include "policy/fair_turns.h"

namespace kv_offload {

class Prefetcher {
 public:
  static constexpr std::size_t kReadsInFlight = 8;
  static constexpr std::size_t kPromptsPerStep = 64, kPromptsWhenIdle = 1024;
  static constexpr std::size_t kChunksPerStep = 256, kChunksWhenIdle = 4096;
  static constexpr Nanos kMinLead = std::chrono::seconds(1), kMaxLead = std::chrono::seconds(60);
  static constexpr Nanos kIdleHorizon = std::chrono::minutes(2);
  static constexpr Nanos kGrace = std::chrono::minutes(1), kPenalty = std::chrono::minutes(10);
  // Dependencies; all of them outlive this.
  struct Context {
    const ChunkGroups& groups;
    HostChunks& chunks;
    RowProvider& row_provider;
    TierIo& ops;
    Metrics& metrics;
  };
  struct Chunk {
    ChunkKey key;
    ChunkId parent = 0;
    std::uint32_t depth = 0;
    std::uint32_t group = 0;
  };
  // The newest prompt of a session.
  struct Prompt {
    std::uint64_t client = 0;
    std::uint32_t family = 0;
    std::int8_t priority = 0;
    TenantId tenant = 0;
    std::uint64_t bytes = 0;    // of all chunks
    std::vector<Chunk> chunks;  // of all groups, by depth
  };

  // `max_bytes`: of prefetched chunks that are not used yet.
  // Watches the removals of `context.chunks`.
  Prefetcher(const Context& context, std::uint64_t max_bytes);
  ~Prefetcher();
  Prefetcher(const Prefetcher&) = delete;
  Prefetcher& operator=(const Prefetcher&) = delete;

  // The session is expected back at this time. Replaces an earlier time. `begins_now`: the reads begin in the
  // next step, even if a later call expects the return much later.
  void expect(const SessionId& session, std::shared_ptr<const Prompt> prompt, Nanos returns_at,
              bool begins_now = false);
  // Ends what was expected of the session: it is back, or it does not return.
  void cancel(const SessionId& session);
  // Call at the end of each step, and with `is_idle` when the last request has ended.
  void run(Nanos now, bool is_idle);
  // A request has arrived: cancels queued reads of which no request needs the chunk.
  void make_way();
  // Forgets all. Does not throw. REQUIRES: HostChunks forgets its chunks right after.
  void forget();

  std::size_t size() const { return tasks_.size(); }  // prompts that are not read yet
  std::uint64_t unused_bytes() const { return unused_bytes_; }

 private:
  struct IdHash {
    std::size_t operator()(const SessionId& id) const { return static_cast<std::size_t>(id.low); }
  };
  // A place in the order, and the session.
  using Due = std::pair<Nanos, std::pair<std::uint64_t, std::uint64_t>>;
  using Queue = std::set<Due>;
  // Each task is in one of these of its tenant. By expected return: those that are not due, and those that
  // are. Tasks that begin now have the time 0, so they come first.
  struct Queues {
    Queue scheduled, ready;
    Queue waiting;            // due, and there was no room at the last visit; in the order of those
    Due last{};               // the last task that add_due() checked in turn
    std::size_t visited = 0;  // visits since tasks in `waiting` became ready again
  };
  struct Task {
    std::shared_ptr<const Prompt> prompt;
    Nanos returns_at{0};
    bool begins_now = false;
    Due at;
    Queue* queue = nullptr;  // that contains `at`
    bool is_due = false;     // it was run when it was due, with requests
    std::size_t next = 0;    // index of the next chunk
    std::size_t asked = 0;   // the tiers were asked for the chunks before this one
  };
  enum class End : std::uint8_t { kNone, kUsed, kUnused, kFailed };
  // A prefetched chunk.
  struct Prefetched {
    ChunkKey key;
    std::uint64_t client = 0, bytes = 0;
    TenantId tenant = 0;
    Nanos expires{0};
    End end = End::kNone;    // other: it has left host memory, or is_wasted
    bool is_wasted = false;  // it was not used in time
  };
  // Of a client or a tenant.
  struct Use {
    std::uint64_t bytes = 0;    // of its chunks in `prefetched_`
    std::uint64_t prompts = 0;  // its tasks
    bool is_none() const { return bytes == 0 && prompts == 0; }
  };
  enum class Step : std::uint8_t { kNext, kLater, kEnd };

  static SessionId session_of(const Due& at) { return {at.second.first, at.second.second}; }
  Task& first_of(const Queue& queue) { return tasks_.at(session_of(*queue.begin())); }
  Queues& queues_of(const Task& task) { return queues_[task.prompt->tenant]; }
  void move(Task& task, Queue* to);  // does not throw; `task` may be in `to` already
  // Checks up to `most` scheduled tasks that return until `end`, and moves those that are due to `ready`.
  void add_due(Queues& queues, Nanos now, Nanos end, bool is_idle, std::size_t most);
  // Visits up to `most` tasks that are ready.
  void visit_ready(Nanos now, bool is_idle, std::size_t most);
  bool is_due(const Task& task, Nanos now) const;
  void visit(const SessionId& session, Nanos now, bool is_idle, std::size_t* chunks);
  Nanos lead_of(const Prompt& prompt) const;
  void remove_finished_reads();
  void review_prefetched(Nanos now);
  // Returns true if the chunk counts no more.
  bool review(Prefetched& chunk, Nanos now);
  static End end_of(const ChunkEntry& entry);  // if it ended now
  void count(End end, std::uint64_t bytes);
  void count_forgotten();
  bool has_room(const Task& task, std::uint64_t bytes) const;
  std::uint64_t limit_of(TenantId tenant) const;  // bytes, see above
  void remove_if_unused(std::uint64_t client);
  // Reads the next chunks of the prompt, and decrements `*chunks` for each chunk examined. Returns kEnd if
  // the prompt is done, and kLater if its next chunk waits for room or for the answer of a tier.
  Step advance(Task& task, std::size_t* chunks, bool is_idle);
  Step fetch(Task& task, const Chunk& chunk, PlannedReads* reads);
  // Returns the tier to read the chunk from; kNoTier or kUnknownTier.
  int tier_of(Task& task, const Chunk& chunk);
  void ask(std::size_t tier, const Task& task);

  const Context with_;
  const std::uint64_t max_bytes_;
  std::unordered_map<SessionId, Task, IdHash> tasks_;
  std::array<Queues, TenantShares::kMaxTenants> queues_;
  FairTurns turns_;                   // of visits: each costs the bytes that it reads, and one chunk
  std::int64_t last_wait_ = 0;        // number of the last move of a task to a queue that waits
  std::deque<Slot> in_flight_;        // oldest read first
  std::list<Prefetched> prefetched_;  // unused ones and wasted ones, in the order of their next review
  // Those that are in host memory or on their way there, and neither used nor wasted.
  std::unordered_map<ChunkKey, std::list<Prefetched>::iterator, ChunkKey::Hash> present_;
  std::uint64_t unused_bytes_ = 0;                           // without the wasted ones
  std::uint64_t uncounted_used_ = 0, uncounted_unused_ = 0;  // bytes of forgotten chunks
  std::unordered_map<std::uint64_t, Use> clients_;
  std::array<Use, TenantShares::kMaxTenants> tenants_{};
};

}  // namespace kv_offload
