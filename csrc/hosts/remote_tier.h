// SPDX-License-Identifier: Apache-2.0
// RemoteTier: the tier of another host (HostTiers), as the scheduler's cache sees it. It holds the parts of
// chunks that belong to the ranks of that host.
//
// It reads and writes rows of the other host's region: an op's row and group count, its shards and memory are
// ignored. What the host has is asked for and remembered (PresenceCache); the host reports what it removes.
//
// While the host is not connected, ops complete with host_lost_error(), contains() is kLookupFailed, and
// nothing is readable or writable. An op that was sent before the connection was lost completes only after
// the host is connected again and no thread of it touches the row any more. A reset of a host that is not
// connected is made up for before the tier is used again.
//
// Threads: one (the scheduler's). Only reset() and close() wait for the other host.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "hosts/tier_channel.h"
#include "tier/tier.h"

namespace kv_offload {

struct RemoteTierOptions {
  std::string name;
  std::size_t tenants = 0;                        // of the cache; the host has as many
  std::vector<std::uint64_t> group_bytes{};       // of the host's part of a chunk, by group
  Nanos reset_timeout{std::chrono::seconds(10)};  // how long reset() waits for the host
  Nanos close_wait{std::chrono::seconds(2)};      // how long close() waits for ops that run; vLLM allows 5 s
  Nanos absent_for{std::chrono::seconds(1)};      // see PresenceCache
  std::size_t most_keys = std::size_t{1} << 19;   // remembered
  // Writes that the host may have at once. Later ones wait here for the next poll, and can be cancelled at
  // once. Those of several tenants are then sent in turn, by their bytes. More than the chunks of most
  // prompts: an engine that becomes idle does not poll.
  std::size_t most_writes = 1024;
};

std::unique_ptr<Tier> make_remote_tier(std::shared_ptr<TierChannel> channel, std::uint8_t index,
                                       RemoteTierOptions options);

}  // namespace kv_offload
