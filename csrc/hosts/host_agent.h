// SPDX-License-Identifier: Apache-2.0
// HostAgent: reports what the ranks of this host publish and finish to the scheduler on another host, and
// executes its orders about the tiers of this host (HostTiers). It runs in the process of the host's first
// rank.
//
// The scheduler connects (HostLinks) with the secret of endpoint(). A new connection of the scheduler
// replaces the one before, and receives everything that the region's rings hold. So no report is lost with a
// connection. A connection on which nothing arrives is closed. Connections without the secret are closed too;
// there are never more than kMostStrangers of them.
//
// Three threads: one waits for reports of the ranks, one polls the sockets, one owns the tiers. No call
// blocks on the network, except that close() waits for the threads.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "base/clock.h"
#include "hosts/host_tiers.h"
#include "memory/host_region.h"

namespace kv_offload {

class HostAgent {
 public:
  static constexpr std::size_t kMostStrangers = 8;  // connections that have not proved anything yet

  struct Options {
    std::string address;  // numeric, of this host
    std::string version;  // of this package
    Nanos alive_interval{std::chrono::seconds(1)};
    // A scheduler that sends no frame for this long counts as lost: its orders may not arrive either. See
    // HostLinks::Options::alive_interval.
    Nanos silence{std::chrono::seconds(3)};
    Nanos handshake_timeout{std::chrono::seconds(5)};
  };

  // Listens on a free port. Throws ResourceError. REQUIRES: the region is that of a worker on a host without
  // the scheduler.
  HostAgent(std::shared_ptr<HostRegion> region, Options options);
  ~HostAgent();  // calls close()

  // For HostRegion::set_endpoint on the scheduler's host. Contains the secret: do not log it.
  std::string endpoint() const;
  std::uint64_t refused_connections() const;  // they did not prove that they have the secret
  // The tiers of this host. The caller opens them when the scheduler asks for it.
  HostTiers& tiers();
  // Closes the tiers, and announces to the scheduler that this host shuts down. Call it when the ranks have
  // reported everything. Idempotent.
  void close();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kv_offload
