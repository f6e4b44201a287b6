// SPDX-License-Identifier: Apache-2.0
// HostLinks: the scheduler's connections to the other hosts of its engine, one per host (HostAgent).
//
// They enter what the ranks of those hosts publish and report in the control page of the scheduler's own
// host. So the cache reads results in one place, wherever a rank runs. While a host is not connected, the
// region is cut off (HostRegion::is_cut_off): lookups miss, nothing is stored, and the requests compute. A
// host that was connected is tried again until close(). Its rows are still valid then: only the process that
// owns the memory has the secret.
//
// They also carry the scheduler's orders to the tiers of the other hosts, and the results: see open_tiers().
//
// A host that does not fit (another package version, other sizes) is not tried again.
//
// MEMORY THAT OUTLIVES THE ENGINE. The table of rows in the scheduler's region describes the rows of all
// hosts (see HostRegion). keep_memory() reads which set each host's region belongs to. If all are equal, the
// table describes this memory. Otherwise all regions get one new id, and the table of another id is cleared.
// No row may be written before keep_memory() returns: until then a region may still have an earlier id.
//
// One thread polls all sockets. Other calls: any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "hosts/remote_tier.h"
#include "hosts/tier_frames.h"
#include "memory/host_region.h"

namespace kv_offload {

// Another host of the engine. Its endpoint appears in the control page of its first rank.
struct RemoteHost {
  std::uint32_t first_rank = 0, ranks = 0;
};

// The memory of all hosts of an engine. Hosts are named by their ranks, for an operator.
struct KeptMemory {
  std::string identity;                // of the region set, for CacheOptions::keep_identity
  std::vector<std::string> missing{};  // hosts without their part of the earlier engine's memory, and why
  std::vector<std::string> ending{};   // hosts whose region ends with the engine (HostRegion::keep)
};

class HostLinks {
 public:
  struct Options {
    std::string version;  // of this package
    // A host that sends no frame for this long counts as lost. Bounds how long a lookup waits for that host's
    // report. Three times HostAgent::Options::alive_interval: one late frame is tolerated.
    Nanos silence{std::chrono::seconds(3)};
    Nanos alive_interval{std::chrono::seconds(1)};   // between two frames to a host: see HostAgent::Options
    Nanos connect_timeout{std::chrono::seconds(5)};  // for a connection and the greeting
    // Pauses between two attempts: the first one, then twice as long each time up to the last. The first
    // pause applies again after the first connection, and after each connection that lasted for
    // `min_lifetime`.
    Nanos first_pause{std::chrono::milliseconds(50)};
    Nanos last_pause{std::chrono::seconds(5)};
    Nanos min_lifetime{std::chrono::seconds(30)};
    // Called at least every 200 ms by open_tiers() and keep_memory() while they wait, on their thread and
    // without locks. An exception ends the wait and leaves them. Empty: not called.
    std::function<void()> on_wait{};
  };

  // Cuts the region off until all hosts are connected. Throws InvalidArgument if the hosts' ranks are not
  // those outside the region, ResourceError. REQUIRES: the region is the scheduler's.
  HostLinks(std::shared_ptr<HostRegion> region, std::vector<RemoteHost> hosts, Options options);
  ~HostLinks();  // calls close()

  // Waits until all hosts are connected and their ranks published. kTimeout: names the hosts that are missing
  // and why. kUnavailable: a host that does not fit, which needs no longer wait.
  Status wait_until_connected(Nanos timeout) const;
  // ---- tiers
  // Orders every other host to open its tiers, and waits until all have. `text`: what the tiers depend on,
  // for the process of the host (HostTiers::wait_for_request). If a connection is lost meanwhile, the host is
  // ordered again on the next one. Returns the opened tiers, [host][tier]. `epochs`: [host][tier]. A later
  // call opens them again. Throws ResourceError that names the first host that cannot open its tiers, or at
  // the timeout all that have not, and their problems. REQUIRES: wait_until_connected() succeeded; no
  // remote_tier() is in use.
  std::vector<std::vector<OpenedTier>> open_tiers(const std::string& text,
                                                  const std::vector<std::vector<EpochChoice>>& epochs,
                                                  Nanos timeout);
  // Lets the regions of all other hosts outlive the engine. `missing` is empty if all regions belong to one
  // set, and if no region belongs to any. Throws ResourceError that names the hosts that have not confirmed
  // it by the timeout, and why. Call it once. REQUIRES: wait_until_connected() succeeded; the region has
  // keep_for.
  KeptMemory keep_memory(Nanos timeout);
  std::size_t num_hosts() const;  // other hosts
  RemoteHost host(std::size_t host) const;
  // Returns the tier of another host. It may outlive this object. REQUIRES: open_tiers().
  std::unique_ptr<Tier> remote_tier(std::size_t host, std::uint8_t tier, RemoteTierOptions options) const;

  // The numbers of the hosts that are not connected now. Host 0 is the scheduler's own, host 1 the first of
  // `hosts`.
  std::vector<std::uint32_t> lost_hosts() const;
  // Lines for an operator about hosts that were lost or came back since the last call.
  std::vector<std::string> take_events();
  // Returns a function that adds such a line. It may outlive this object. Any thread.
  std::function<void(std::string)> event_sink() const;
  void close();  // the region stays cut off. Idempotent

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kv_offload
