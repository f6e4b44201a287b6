// SPDX-License-Identifier: Apache-2.0
// HostTiers: the tiers of a host without the scheduler. Executes what the scheduler orders (tier_frames.h),
// over the rows of this host's region, and reports the results.
//
// The scheduler's orders belong to a connection. When a connection begins or ends, orders of earlier ones
// that have not started are cancelled. kOpsEnded is sent on a new connection once none of them is running:
// from then on no thread touches the rows of earlier orders.
//
// Threads: one thread owns the tiers and calls them; the calls below only pass it orders and take its frames.
// No call waits for storage, except open() and close().
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "hosts/tier_frames.h"
#include "memory/host_region.h"
#include "tier/tier.h"

namespace kv_offload {

class HostTiers {
 public:
  using Frame = std::pair<FrameType, Bytes>;

  // `on_frames`: called on the thread of the tiers when frames() has more.
  HostTiers(std::shared_ptr<const HostRegion> region, std::function<void()> on_frames);
  ~HostTiers();  // calls close()

  // ---- the thread of the connection
  void begin_connection();
  void end_connection();
  // Takes a frame of the scheduler. False: it is malformed, or does not fit this host; it changed nothing.
  bool take(FrameType type, ByteSpan body);
  // True if no more frames should be read for now: too many orders wait. on_frames follows.
  bool is_full() const;
  // True if memory ran out since begin_connection(): orders or results are lost, and the connection has to
  // end. on_frames has been called.
  bool has_failed() const;
  // Returns the frames to send on this connection, in order.
  std::vector<Frame> frames();

  // ---- the opening of the tiers, on any thread
  // Waits for the next request of the scheduler to open its tiers; empty: timeout, or closed.
  std::optional<OpenTiers> wait_for_request(Nanos timeout);
  // Answers a request. The tiers replace those of an earlier request, which are closed first. `tenants`:
  // number of tenants that divide them; 0: none.
  void open(std::uint32_t round, std::vector<std::unique_ptr<Tier>> tiers, std::size_t tenants = 0);
  void refuse(std::uint32_t round, const std::string& problem);
  // Closes the tiers of an earlier request now: two tiers must not use one directory with one bound.
  void close_tiers();

  void close();  // closes the tiers. Idempotent
  bool is_closed() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kv_offload
