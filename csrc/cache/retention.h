// SPDX-License-Identifier: Apache-2.0
// Retention: the prompts of sessions that hints keep in host memory for a limited time: retained (evicted
// last, until their next use) or pinned (not evicted).
//
// Bounds: pinned chunks use at most max_pinned_bytes, half of that for one client, and for one tenant its
// share of max_pinned_bytes; max_pinned_bytes is at most half of host memory, so pins never keep loads and
// stores from all rows. A pinned chunk holds one pin for each session that pins it, and counts for each. A
// chunk is retained until its next use, or until the last session that retains it ends that. Chunks that are
// still being copied are left out.
//
// If memory runs out in a call, it has retained or pinned some of the chunks, and these end like all others.
// end(), and the end of pins, allocate nothing.
//
// Cost: O(log n) per chunk of the prompts named in a call, or of those whose time ended; end_step() ends the
// retention of at most kEndedAtOnce chunks.
//
// Threads: one (the scheduler's).
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "cache/chunk_groups.h"
#include "cache/host_chunks.h"

namespace kv_offload {

class Retention {
 public:
  static constexpr std::size_t kEndedAtOnce = 2048;
  // Dependencies; all of them outlive this.
  struct Context {
    const ChunkGroups& groups;
    HostChunks& chunks;
    const Clock& clock;
  };
  // A prompt and the session that it belongs to.
  struct Prompt {
    SessionId session;
    std::uint64_t client = 0;
    std::int8_t priority = 0;            // of its chunks when they are no longer retained
    const std::vector<ChunkId>& chunks;  // from the last to the first
    TenantId tenant = 0;
  };

  Retention(const Context& context, std::uint64_t max_pinned_bytes);

  // Each replaces an earlier call for the same session. REQUIRES: seconds is not negative.
  HintOutcome retain(const Prompt& prompt, double seconds);
  // Pins the first chunks of the prompt, at most `bytes` (0 = no limit but the cache's).
  HintOutcome pin(const Prompt& prompt, double seconds, std::uint64_t bytes);
  void end_retention(const SessionId& session);
  void end(const SessionId& session);  // ends its pins, too
  void end_step();                     // ends what is over
  // Forgets all. REQUIRES: HostChunks has forgotten its chunks.
  void forget();

  std::uint64_t pinned_bytes() const { return pinned_bytes_; }

 private:
  struct Hold {
    std::uint64_t client = 0;
    TenantId tenant = 0;
    std::int8_t priority = 0;
    Nanos retained_until{0}, pinned_until{0};  // 0 = not retained, not pinned
    std::vector<ChunkId> retained;
    std::vector<Slot> pinned;
    std::uint64_t pinned_bytes = 0;

    Nanos deadline() const {
      if (retained_until == Nanos(0) || pinned_until == Nanos(0))
        return std::max(retained_until, pinned_until);
      return std::min(retained_until, pinned_until);
    }
  };
  struct IdHash {
    std::size_t operator()(const SessionId& id) const { return static_cast<std::size_t>(id.low); }
  };
  using Deadline = std::pair<Nanos, std::pair<std::uint64_t, std::uint64_t>>;

  static Deadline deadline_of(const SessionId& id, const Hold& hold) {
    return {hold.deadline(), {id.high, id.low}};
  }
  class Change;
  Nanos after(double seconds) const;
  void end_retention(Hold& hold, std::size_t most);
  void unpin(Hold& hold);
  // Returns the bytes that the tenant may still pin.
  std::uint64_t left_of_tenant(TenantId tenant) const;
  std::uint64_t bytes_of(Slot slot) const { return context_.groups[context_.chunks.at(slot).group].bytes; }

  const Context context_;
  const std::uint64_t max_pinned_bytes_;
  std::unordered_map<SessionId, Hold, IdHash> holds_;
  std::unordered_map<ChunkId, std::uint32_t> retained_by_;  // number of sessions that retain the chunk
  std::set<Deadline> deadlines_;
  std::uint64_t pinned_bytes_ = 0;
  std::unordered_map<std::uint64_t, std::uint64_t> of_client_;  // its pinned bytes
  std::array<std::uint64_t, TenantShares::kMaxTenants> of_tenant_{};
};

}  // namespace kv_offload
