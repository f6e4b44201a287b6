// SPDX-License-Identifier: Apache-2.0
// Sessions: remembers the newest prompt of each session, and executes hints about sessions and prompts.
//
// A hint changes only the order of eviction. An expected return or its end applies to the chunks of its
// target that are in host memory and belong to the family of the target (HostChunks::claim), so a hint never
// affects chunks that other sessions use. A name alone selects no session: a SessionId contains the first
// chunk of its prompts, whose key depends on the client's cache_salt.
//
// A hint that a session returns also prefetches its newest prompt from tiers. For that, the keys of its
// chunks are remembered, including those that were evicted.
//
// Bounded: at most CacheOptions::max_sessions sessions, half of them of one client, and twice as many chunks
// as host memory has (8 bytes each, with tiers 72). The least recently used session is forgotten first, of
// the same client if the client is at its limit.
//
// Cost: O(log n) per chunk of the prompts that a call names. So that a short request cannot block the
// scheduler, the hints of one call name at most kMaxNamed chunks; the first hint may name more.
// Threads: one (the scheduler's).
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "cache/chunk_groups.h"
#include "cache/hint_trust.h"
#include "cache/host_chunks.h"
#include "cache/prefetcher.h"
#include "cache/request_state.h"
#include "cache/retention.h"

namespace kv_offload {

class Sessions {
 public:
  static constexpr std::size_t kMaxNamed = 65'536;
  static constexpr double kPrefetchSeconds = 1;  // a prefetch hint expects the session within this time
  // Dependencies; all of them outlive this.
  struct Context {
    const ChunkGroups& groups;
    HostChunks& chunks;
    const Clock& clock;
    Prefetcher* prefetcher = nullptr;  // null: there is no tier
  };
  // `max_pinned_bytes`: see Retention.
  Sessions(const Context& context, const CacheOptions& options, std::uint64_t max_pinned_bytes);

  // Executes hints about other sessions. Returns an outcome for each.
  std::vector<HintOutcome> apply(std::span<const Hint> hints);
  // The turn has ended: its request's prompt is the newest one of its session. Then executes hints about it
  // and about the earlier prompt of its session.
  std::vector<HintOutcome> end_turn(const Turn& turn, const RequestState& request,
                                    std::span<const Hint> hints);
  // False if this client's hints about returns turned out to say nothing. They are rejected until they do.
  bool is_trusted(std::uint64_t client) const;
  void end_step() { retention_.end_step(); }
  // Forgets all. REQUIRES: HostChunks has forgotten its chunks.
  void forget();

  std::uint64_t pinned_bytes() const { return retention_.pinned_bytes(); }
  std::size_t size() const { return sessions_.size(); }

 private:
  using Chunks = std::vector<ChunkId>;
  using Prompt = std::shared_ptr<const Prefetcher::Prompt>;
  struct Session {
    SessionId id;
    std::uint64_t client = 0;
    std::uint64_t use = 0;
    std::uint32_t family = 0;
    std::int8_t priority = 0;  // of the request of its newest prompt, like the tenant
    TenantId tenant = 0;
    double ended = 0;         // when that request ended, in seconds
    double expected = 0;      // seconds until the next request, by a hint; 0 = unknown
    double given_return = 0;  // the return of the last hint that counted as given since then; 0 = none
    int given_hints = 0;      // hints that counted as given since then, at most kGivenHints
    Chunks chunks;            // of its newest prompt, from the last to the first of each group
    Prompt prompt;            // the same with its evicted chunks, to prefetch it; null without tiers
    std::size_t size() const { return std::max(chunks.size(), prompt ? prompt->chunks.size() : 0); }
  };
  // What a hint is about.
  struct Target {
    const Chunks& chunks;
    std::uint32_t family;
    SessionId session;
    std::uint64_t client;
    std::int8_t priority;
    bool may_prefetch;     // some of its chunks may be on a tier
    double overdue_since;  // see overdue_since()
    TenantId tenant;
  };
  struct IdHash {
    std::size_t operator()(const SessionId& id) const { return static_cast<std::size_t>(id.low); }
  };

  double now() const { return to_seconds(context_.clock.now()); }
  // Counts chunks that a hint names. Returns false if the hints of this call name too many.
  bool may_name(std::size_t chunks);
  // Returns the chunks of the request's prompt that are in host memory, without those before a gap.
  Chunks prompt_of(const Offers& offers) const;
  HintOutcome apply(const Hint& hint, const Target& target);
  // If the hint expects the session, remembers that and prefetches its prompt (unless it was rejected).
  void expect(const SessionId& id, const Hint& hint, HintOutcome outcome);
  // The first hints about a return after each turn count as given, so that a client can correct them. Later
  // ones count from when the session became overdue: repeated hints do not keep a chunk indefinitely.
  static constexpr int kGivenHints = 4;
  // Returns the time since which the session is overdue, for its next hint; 0 if that counts as given.
  static double overdue_since(const Session& session) {
    return session.given_hints < kGivenHints ? 0 : session.given_return;
  }
  // Returns the time from now until the return that counts.
  double seconds_until(const Hint& hint, double overdue_since) const;
  // Time from now until the return that the hint expects.
  static double seconds_of(const Hint& hint) {
    return hint.type == HintType::kPrefetch ? kPrefetchSeconds : hint.seconds;
  }
  // Compares what was expected of the session with this turn.
  void learn_from(const Turn& turn, const RequestState& request);
  // The earlier prompt of a session was replaced: its chunks that are not in `prompt` do not return.
  HintOutcome supersede(const SessionId& id, const Chunks& prompt);
  const Chunks& chunks_of(const SessionId& id) const;  // empty if unknown
  // Sets the return of the target's chunks, except those in `spared`. Returns false if none is in host
  // memory.
  bool set_return(const Chunks& chunks, std::uint32_t family, double returns_at, const Chunks& spared);
  Session& session_of(const Turn& turn);  // adds a session without chunks if it is unknown
  void remember(const Turn& turn, const RequestState& request, Chunks prompt);
  // Returns the keys of these chunks and of those before them in the earlier prompt.
  Prompt keys_of(const Chunks& chunks, const Session& session) const;
  void cancel_prefetch(const SessionId& id);
  void forget(const SessionId& id);
  void forget(Session& session);
  bool is_full() const { return sessions_.size() > max_sessions_ || remembered_ > max_remembered_; }

  const Context context_;
  Retention retention_;
  const std::size_t max_sessions_, max_of_client_, max_remembered_;
  std::unordered_map<SessionId, Session, IdHash> sessions_;
  std::map<std::uint64_t, Session*> by_use_;
  std::map<std::pair<std::uint64_t, std::uint64_t>, Session*> by_client_;  // client, use
  struct Client {
    std::size_t sessions = 0;
    HintTrust trust;
  };
  std::unordered_map<std::uint64_t, Client> clients_;  // those with sessions
  std::uint64_t last_use_ = 0;
  std::size_t remembered_ = 0;  // chunks in all sessions
  std::size_t named_ = 0;       // chunks that the hints of this call named so far
};

}  // namespace kv_offload
