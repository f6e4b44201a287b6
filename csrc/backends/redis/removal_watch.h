// SPDX-License-Identifier: Apache-2.0
// RemovalWatch: finds the records that a server or another client removes, and reports them to the
// PresenceCache. A notice only says that a key changed, so run() asks the server whether the record exists.
//
// No removal is lost if memory runs out: run() may throw, and the next call checks all keys.
//
// One thread at a time, except problem().
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "backends/redis/cluster.h"
#include "backends/redis/removal_notices.h"
#include "base/clock.h"
#include "base/types.h"
#include "tier/presence.h"

namespace kv_offload::redis {

class RemovalWatch {
 public:
  using Time = RemovalNotices::Time;
  static constexpr std::size_t kKeysPerRun = 2048;                // keys that one run() checks
  static constexpr std::size_t kMostKeys = std::size_t{1} << 16;  // that wait to be checked
  static constexpr std::uint64_t kSettledRuns = 10;

  // cluster: must outlive this object. op_timeout: of operations on it. The PresenceCache knows the result of
  // a write or a lookup within this time after the server sent it.
  RemovalWatch(Cluster& cluster, const std::string& prefix, Nanos op_timeout)
      : cluster_(cluster), op_timeout_(op_timeout), notices_(cluster, prefix) {}

  // `known` is the cache of the epoch with this number, and names of its records begin with `prefix`. `until`
  // limits the lookups of changed records. Ends soon once `stopped` is true.
  void run(PresenceCache& known, PresenceCache::EpochNumber epoch_number, const std::string& prefix,
           Deadline until, const std::atomic<bool>& stopped);
  // Returns why removals are found only by reads; empty: they are found, or run() was not called yet.
  std::string problem() const { return notices_.problem(); }
  void close() { notices_.close(); }

 private:
  // The moment when all results that the server had sent before are known. The number of runs covers a
  // stopped process (SIGSTOP): time passes, but its I/O threads do not run.
  struct Settled {
    Time time{};
    std::uint64_t run = 0;
  };
  struct Waiting {
    Settled until;
    ChunkKey key;
  };
  Settled settled_from(Time now) const { return {now + op_timeout_, runs_ + kSettledRuns}; }
  bool is_over(const Settled& moment, Time now) const { return moment.time <= now && moment.run <= runs_; }
  void doubt_all(Time now);
  void doubt(const ChunkKey& key, Time now);
  void wait(const ChunkKey& key, Time now);
  void collect(PresenceCache& known, const std::string& prefix, const std::atomic<bool>& stopped);
  void list(PresenceCache& known, Time now);
  void check(PresenceCache& known, const std::string& prefix, Deadline until);

  Cluster& cluster_;
  const Nanos op_timeout_;
  RemovalNotices notices_;
  PresenceCache::EpochNumber epoch_number_ = 0;
  std::uint64_t runs_ = 0;
  bool queued_ = true;              // false: changes were received, and memory ran out before they were noted
  std::vector<ChunkKey> doubtful_;  // present as far as we know, and changed since
  // Changed keys that are not known as present. A write or a lookup may be about to report them as present.
  std::deque<Waiting> waiting_;
  // Changes were missed: every present key is doubtful. They are listed at once, and again when the results
  // of earlier operations are known. A listing is never begun again before its end, however often changes are
  // missed.
  struct {
    bool due = false;     // a listing must begin after `settled`
    bool listed = false;  // all keys were listed since changes were missed
    Settled settled;
  } all_;
  struct {
    bool active = false, settled = false, outdated = false;  // outdated: changes were missed since its begin
    std::uint64_t next = 0;                                  // first entry that is not listed yet
  } listing_;
  Time ask_again_{};  // the time of the next lookup after one that failed
};

}  // namespace kv_offload::redis
