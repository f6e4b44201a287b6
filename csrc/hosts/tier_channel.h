// SPDX-License-Identifier: Apache-2.0
// TierChannel: passes frames about the tiers of one other host between the scheduler's thread (RemoteTier)
// and the thread of the connections (HostLinks).
//
// Orders belong to a connection: those of a lost one are never sent on the next one.
//
// Threads: as given below; any for the rest. No call does I/O. wait() and wait_until_open() wait for the
// other host.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
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
  enum class Delivery : std::uint8_t {
    kTaken,
    kMalformed,  // or about a tier that does not exist
    kTooMuch,    // more waits for take_events() than kMostWaiting; the connection has to end
  };
  static constexpr std::size_t kMostWaiting = std::size_t{16} << 20;  // bytes of frames, per tier
  struct Event {
    Nanos at{0};  // when it arrived
    std::variant<Lost, Ready, TierResults, TierAnswers, TierRemovals, TierResetDone, TierState> what;
  };

  explicit TierChannel(std::function<void()> wake);

  // ---- the thread of the connections
  // Repeats the order to open the tiers if it was not answered.
  void begin_connection() EXCLUDES(mutex_);
  // Drops all events that were not taken. Needs no memory. `is_final`: there will be no other connection.
  // If not connected, only updates the reported problem.
  void end_connection(const std::string& problem, bool is_final = false) noexcept EXCLUDES(mutex_);
  // Takes a frame of the host.
  Delivery deliver(FrameType type, ByteSpan body, Nanos now) EXCLUDES(mutex_);
  // Also encodes ops and uses, which would take longer than all the rest of a step on the scheduler's thread.
  // If memory runs out, throws and drops all that was queued: the connection has to end.
  std::vector<Frame> take_frames() EXCLUDES(mutex_);

  // ---- the scheduler's thread
  // Queues all frames for this connection, or none: false if it has ended. `may_drop`: also none if much
  // waits to be sent, and the thread is not woken for a few of them: it sends them in its next turn, at the
  // latest before the next order. If memory runs out, throws and queues none.
  bool send(ConnectionNumber connection, std::vector<Frame> frames, bool may_drop = false) EXCLUDES(mutex_);
  // The same for ops that take_frames() encodes, of any number.
  bool send_ops(ConnectionNumber connection, TierOps ops) EXCLUDES(mutex_);
  // The same for uses. `may_drop` is true.
  void send_uses(ConnectionNumber connection, std::uint8_t tier, TierUses uses) EXCLUDES(mutex_);
  std::vector<Event> take_events(std::uint8_t tier) EXCLUDES(mutex_);
  // False: take_events() would return nothing. Takes no lock, for a scheduler that polls many hosts.
  bool has_events(std::uint8_t tier) const {
    return (has_events_.load(std::memory_order_acquire) >> tier & 1) != 0;
  }
  void wait(std::uint8_t tier, Nanos timeout) EXCLUDES(mutex_);  // until the tier has events
  // Orders the host to open its tiers, one for each of `epochs`.
  void begin_open(std::vector<EpochChoice> epochs, std::string text) EXCLUDES(mutex_);
  // Waits until the host has opened them, also over a later connection. Ok: *tiers are those of the host.
  Status wait_until_open(Nanos timeout, std::vector<OpenedTier>* tiers) EXCLUDES(mutex_);

 private:
  struct Uses {
    std::uint8_t tier = 0;
    TierUses uses;
  };
  using Queued = std::variant<Frame, TierOps, Uses>;
  static void append_frames(Queued& queued, std::vector<Frame>* frames);
  void send_request() REQUIRES(mutex_);
  // False: the connection has ended, or the frames are dropped.
  bool takes(ConnectionNumber connection, bool may_drop) const REQUIRES(mutex_);
  struct Waiting {         // for take_events()
    bool is_lost = false;  // a connection has ended, before all of `events`
    std::vector<Event> events;
    std::size_t bytes = 0;  // of their frames, without those of TierState
  };
  void add_event(std::size_t tier, Event event) REQUIRES(mutex_);
  void set_has_events(std::size_t tier, bool has) REQUIRES(mutex_);

  static_assert(kMostTiers <= 32);
  // By tier, one bit each. First, and then what a step of the scheduler needs if nothing has arrived: after a
  // copy of a prompt, each further cache line costs it a cache miss for each host.
  std::atomic<std::uint32_t> has_events_{0};
  Mutex mutex_;
  bool connected_ GUARDED_BY(mutex_) = false;
  ConnectionNumber connection_ GUARDED_BY(mutex_) = 0;  // the last one
  std::size_t outbox_bytes_ GUARDED_BY(mutex_) = 0;     // about; ops and uses are not encoded yet
  std::vector<Queued> outbox_ GUARDED_BY(mutex_);       // keeps its memory, see taken_
  bool is_final_ GUARDED_BY(mutex_) = false;            // it will not be connected again
  bool is_ready_ GUARDED_BY(mutex_) = false;            // kOpsEnded arrived on it
  std::vector<Waiting> waiting_ GUARDED_BY(mutex_);     // by tier; empty before begin_open()
  OpenTiers request_ GUARDED_BY(mutex_);                // the last order; each transmission has a new round
  std::optional<TiersOpened> opened_ GUARDED_BY(mutex_);
  std::string problem_ GUARDED_BY(mutex_) = "it is not connected yet";
  CondVar changed_;
  const std::function<void()> wake_;
  std::vector<Queued> taken_;  // scratch of take_frames(), by turns with outbox_
};

}  // namespace kv_offload
