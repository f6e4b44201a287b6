// SPDX-License-Identifier: Apache-2.0
#include "hosts/open_tiers.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/status.h"

namespace kv_offload {
namespace {

constexpr int kMostRounds = 4;  // each one starts after a reset by another engine

double bytes_of(const HostRegion& region, std::uint32_t first_rank, std::uint32_t ranks) {
  double bytes = 0;
  for (std::uint32_t i = 0; i < ranks; ++i) {
    for (const std::uint64_t shard : region.geometry(first_rank + i).shard_bytes)
      bytes += static_cast<double>(shard);
  }
  return bytes;
}

}  // namespace

Tiers open_on_all_hosts(HostLinks& links, const HostRegion& region, std::size_t tiers,
                        const std::function<Tiers(const std::vector<std::uint64_t>& least_epochs)>& open_own,
                        const std::string& text, const OpenOptions& options) {
  std::vector<std::uint64_t> least(tiers);
  Tiers own;
  for (int round = 0;; ++round) {
    own.clear();
    own = open_own(least);
    std::vector<std::vector<std::uint64_t>> epochs = links.open_tiers(text, tiers, least, options.timeout);
    std::vector<std::uint64_t>& own_epochs = epochs.emplace_back();
    for (const auto& tier : own) own_epochs.push_back(tier->stats().epoch);
    bool agree = true;
    for (std::size_t tier = 0; tier < tiers; ++tier) {
      for (const auto& of_host : epochs) {
        if (of_host[tier] == 0) {
          throw_resource(
              "tier {} cannot be used by an engine on several hosts: its store has no numbered epochs",
              own[tier]->name());
        }
        agree = agree && of_host[tier] == own_epochs[tier];
        least[tier] = std::max(least[tier], of_host[tier]);
      }
    }
    if (agree) break;
    if (round + 1 == kMostRounds)
      throw_resource("the tiers of this engine's hosts were reset again and again while they were opened");
  }
  const double all_bytes = bytes_of(region, 0, region.options().num_workers);
  const auto share = [&](std::uint32_t first_rank, std::uint32_t ranks) {
    return all_bytes > 0 ? bytes_of(region, first_rank, ranks) / all_bytes : 1;
  };
  Tiers opened;
  for (std::size_t tier = 0; tier < tiers; ++tier) {
    RemoteTierOptions remote = options.remote;
    remote.name = std::string(own[tier]->name());
    std::vector<PartOfTier> parts;
    parts.push_back({std::move(own[tier]), share(region.first_rank(), region.local_ranks())});
    for (std::size_t host = 0; host < links.num_hosts(); ++host) {
      const RemoteHost other = links.host(host);
      parts.push_back({links.remote_tier(host, static_cast<std::uint8_t>(tier), remote),
                       share(other.first_rank, other.ranks)});
    }
    opened.push_back(make_all_hosts_tier(std::move(parts), options.all_hosts));
  }
  return opened;
}

}  // namespace kv_offload
