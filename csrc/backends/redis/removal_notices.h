// SPDX-License-Identifier: Apache-2.0
// RemovalNotices: receives the names of the keys under a prefix that a server evicts, expires, removes or
// writes. The server sends them because of CLIENT TRACKING in broadcasting mode (Redis 6 and later, Valkey).
//
// Each node that owns keys has two connections: one that is subscribed, and one that enabled tracking and
// redirects the notices to the first. The server closes the connection of a subscriber that does not read
// (client-output-buffer-limit pubsub), so its memory is bounded. Notices may also be lost in other ways;
// `all` is then true: any key may have changed.
//
// One thread at a time, except problem().
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "backends/redis/cluster.h"
#include "base/thread_annotations.h"

namespace kv_offload::redis {

class RemovalNotices {
 public:
  // Real time, because these are waits for sockets.
  using Time = std::chrono::steady_clock::time_point;
  static constexpr std::chrono::seconds kWaitAtMost{1};  // of one take(), for all nodes together
  static constexpr std::chrono::seconds kCheckEvery{10};
  // Until the next attempt to connect, after a failure; doubled with each further one. A connection that
  // lasted for kLasting is replaced at once.
  static constexpr std::chrono::seconds kRetryAfter{1}, kRetryAtMost{30}, kLasting{10};
  static constexpr std::chrono::seconds kAskAgainAfter{60};  // after the server refused

  struct Changes {
    std::vector<std::string> keys;
    bool all = false;  // other keys may have changed too
  };

  // cluster: must outlive this object. check_every: interval of the checks that both connections of a node
  // work.
  RemovalNotices(const Cluster& cluster, std::string prefix,
                 std::chrono::milliseconds check_every = kCheckEvery)
      : cluster_(cluster), prefix_(std::move(prefix)), check_every_(check_every) {}

  // Returns the changes since the last call. Waits for nodes only to connect to them and to check them. Ends
  // soon once `stopped` is true.
  Changes take(const std::atomic<bool>& stopped) EXCLUDES(mutex_);
  // Returns which command a node refused and why; empty: none, or take() has not connected yet.
  std::string problem() const EXCLUDES(mutex_);
  void close() { feeds_.clear(); }

 private:
  struct Feed {
    std::unique_ptr<Connection> subscriber, tracker;  // both or none
    Time begun{}, due{};                              // connected at; next check, or next attempt to connect
    std::chrono::seconds wait{0};                     // after the next failure
    bool asked = false;                               // the subscriber has not answered the last check
    std::string refusal;
  };
  Status connect(Node& node, Deadline until, Feed* feed);
  Status receive(Deadline until, Feed* feed, Changes* changes);
  Status check(Deadline until, Feed* feed);
  static void failed(const Status& status, Feed* feed);
  bool read(const Reply& message, Feed* feed, Changes* changes) const;

  const Cluster& cluster_;
  const std::string prefix_;
  const std::chrono::milliseconds check_every_;
  std::map<NodePtr, Feed> feeds_;
  mutable Mutex mutex_;
  std::string problem_ GUARDED_BY(mutex_);
};

}  // namespace kv_offload::redis
