// SPDX-License-Identifier: Apache-2.0
// TierChannel: passes frames about the tiers of one other host between the scheduler's thread (RemoteTier)
// and the thread of the connections (HostLinks).
//
// Orders belong to a connection: those of a lost one are never sent on the next one.
//
// Threads: any. No call does I/O. wait() and open() wait for the other host.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "base/thread_annotations.h"
#include "hosts/tier_frames.h"

namespace kv_offload {

class TierChannel {
 public:
  using Frame = std::pair<FrameType, Bytes>;
  using ConnectionNumber = std::uint64_t;  // never 0
  struct Lost {};                          // the connection has ended
  struct Ready {                           // orders may be sent; those of earlier connections have ended
    ConnectionNumber connection = 0;
  };
  struct Event {
    Nanos at{0};  // when it arrived
    std::variant<Lost, Ready, TierResults, TierAnswers, TierRemovals, TierResetDone, TierState> what;
  };

  explicit TierChannel(std::function<void()> wake) : wake_(std::move(wake)) {}

  // ---- the thread of the connections
  void begin_connection() EXCLUDES(mutex_);
  void end_connection(const std::string& problem) EXCLUDES(mutex_);
  // Takes a frame of the host. False: it is malformed, or about a tier that does not exist.
  bool deliver(FrameType type, ByteSpan body, Nanos now) EXCLUDES(mutex_);
  std::vector<Frame> take_frames() EXCLUDES(mutex_);

  // ---- the scheduler's thread
  // Queues all frames for this connection, or none: false if it has ended. `may_drop`: also none if much
  // waits to be sent. If memory runs out, throws and queues none.
  bool send(ConnectionNumber connection, std::vector<Frame> frames, bool may_drop = false) EXCLUDES(mutex_);
  std::vector<Event> take_events(std::uint8_t tier) EXCLUDES(mutex_);
  void wait(std::uint8_t tier, Nanos timeout) EXCLUDES(mutex_);  // until the tier has events
  // Orders the host to open its tiers. Ok: *epochs has the epoch of each.
  Status open(const OpenTiers& request, std::size_t tiers, Nanos timeout, std::vector<std::uint64_t>* epochs)
      EXCLUDES(mutex_);

 private:
  template <typename What>
  void add_event(std::uint8_t tier, What what, Nanos now) REQUIRES(mutex_);

  const std::function<void()> wake_;
  Mutex mutex_;
  CondVar changed_;
  bool connected_ GUARDED_BY(mutex_) = false;
  std::string problem_ GUARDED_BY(mutex_) = "it is not connected yet";
  ConnectionNumber connection_ GUARDED_BY(mutex_) = 0;  // the last one
  bool is_ready_ GUARDED_BY(mutex_) = false;            // kOpsEnded arrived on it
  std::vector<Frame> outbox_ GUARDED_BY(mutex_);
  std::size_t outbox_bytes_ GUARDED_BY(mutex_) = 0;
  std::vector<std::vector<Event>> events_ GUARDED_BY(mutex_);  // by tier
  std::uint32_t round_ GUARDED_BY(mutex_) = 0;                 // of the last request to open
  std::deque<TiersOpened> opened_ GUARDED_BY(mutex_);
};

}  // namespace kv_offload
