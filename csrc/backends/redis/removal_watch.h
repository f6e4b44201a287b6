// SPDX-License-Identifier: Apache-2.0
// RemovalWatch: finds the records that a server or another client removes, and reports them to the
// PresenceCache. A notice only says that a key changed, so the server is asked whether it still exists.
//
// One thread at a time, except problem().
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "backends/redis/cluster.h"
#include "backends/redis/removal_notices.h"
#include "base/types.h"
#include "tier/presence.h"

namespace kv_offload::redis {

class RemovalWatch {
 public:
  using Time = RemovalNotices::Time;
  static constexpr std::size_t kKeysPerRun = 2048;  // that the server is asked about in one run()
  static constexpr std::size_t kMostWaiting = std::size_t{1} << 16;  // changed keys that wait for kSettled
  // The result of a write or a lookup is known to the PresenceCache within this time after the server sent
  // it, and within so many runs: a process that was stopped has waited for nothing.
  static constexpr std::chrono::seconds kSettled{1};
  static constexpr std::uint64_t kSettledRuns = 10;

  // cluster: must outlive this object.
  RemovalWatch(Cluster& cluster, const std::string& prefix) : cluster_(cluster), notices_(cluster, prefix) {}

  // known: of the epoch with this number. prefix: the names of its records begin with it.
  void run(PresenceCache& known, PresenceCache::EpochNumber epoch_number, const std::string& prefix);
  // Returns why removals are found only by reads; empty: they are found, or run() was not called yet.
  std::string problem() const { return notices_.problem(); }
  void close() { notices_.close(); }

 private:
  struct Waiting {
    Time until;
    std::uint64_t until_run;
    ChunkKey key;
  };
  void wait(const ChunkKey& key, Time now);
  void collect(PresenceCache& known, const std::string& prefix);
  void check(PresenceCache& known, const std::string& prefix);

  Cluster& cluster_;
  RemovalNotices notices_;
  PresenceCache::EpochNumber epoch_number_ = 0;
  std::uint64_t runs_ = 0;
  std::vector<ChunkKey> doubtful_;  // present as far as we know, and changed since
  // Changed keys that are not known as present. A write or a lookup may be about to report them as present.
  std::deque<Waiting> waiting_;
  // Changes were missed: every present key is doubtful. From this entry on they were not listed yet.
  bool listing_ = false;
  std::uint64_t next_listed_ = 0;
};

}  // namespace kv_offload::redis
