// SPDX-License-Identifier: Apache-2.0
#include "hosts/open_tiers.h"

#include <algorithm>
#include <utility>

#include "base/status.h"
#include "tier/epoch_registry.h"

namespace kv_offload {
namespace {

constexpr int kMostRounds = 8;  // more than two only if other engines begin epochs at the same time

// Returns the same id for the same epochs: engines that start at once, and find each other's, then agree.
std::uint64_t next_id(const std::vector<std::vector<std::uint64_t>>& ids, std::size_t tier) {
  std::uint64_t mixed = 0;
  for (const auto& of_host : ids) {
    if (of_host[tier] == 0) return EpochRegistry::new_id();
    mixed = (mixed ^ of_host[tier]) * 0x9E3779B97F4A7C15;
    mixed ^= mixed >> 32;
  }
  return std::max<std::uint64_t>(mixed, 1);
}

bool has_none_yet(const std::vector<std::vector<std::uint64_t>>& ids, std::size_t tier) {
  return std::any_of(ids.begin(), ids.end(),
                     [&](const auto& of_host) { return of_host[tier] == kNoEpochYet; });
}

// "the host of rank 0, the host of rank 2": those whose store has no epoch yet.
std::string silent_hosts(const std::vector<std::vector<std::uint64_t>>& ids, const HostLinks& links,
                         std::size_t tier) {
  std::vector<std::string> silent;
  if (ids.back()[tier] == kNoEpochYet) silent.emplace_back("the host of rank 0");
  for (std::size_t host = 0; host < links.num_hosts(); ++host) {
    if (ids[host][tier] == kNoEpochYet)
      silent.push_back(fmt::format("the host of rank {}", links.host(host).first_rank));
  }
  return fmt::format("{}", fmt::join(silent, ", "));
}

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
                        const std::function<Tiers(const std::vector<EpochChoice>& epochs)>& open_own,
                        const std::string& text, const OpenOptions& options) {
  std::vector<EpochChoice> own_choices(tiers, {EpochRegistry::new_id(), false, 0});
  std::vector<std::vector<EpochChoice>> choices(links.num_hosts(), own_choices);
  Tiers own;
  std::vector<bool> awaits_epoch(tiers);
  std::vector<std::vector<std::uint64_t>> ids;  // by host: the others, then this one
  const SteadyClock clock;
  const Nanos end = clock.now() + options.timeout;
  for (int round = 0;; ++round) {
    own.clear();
    own = open_own(own_choices);
    ids = links.open_tiers(text, choices, end - clock.now());
    std::vector<std::uint64_t>& own_ids = ids.emplace_back();
    for (const auto& tier : own) own_ids.push_back(opened_epoch(*tier));
    bool agree = true;
    for (std::size_t tier = 0; tier < tiers; ++tier) {
      // The choice stays: hosts whose stores have no epoch begin one with the same id, also later.
      awaits_epoch[tier] = has_none_yet(ids, tier);
      if (awaits_epoch[tier]) continue;
      const bool is_same = std::all_of(ids.begin(), ids.end(), [&](const auto& of_host) {
        return of_host[tier] != 0 && of_host[tier] == own_ids[tier];
      });
      // If all hosts agree on a tier, the next round opens the same epoch. If a store loses it meanwhile, it
      // gets an unused id.
      const std::uint64_t next = is_same ? EpochRegistry::new_id() : next_id(ids, tier);
      for (std::size_t host = 0; host < choices.size(); ++host)
        choices[host][tier] = {next, !is_same, ids[host][tier]};
      own_choices[tier] = {next, !is_same, own_ids[tier]};
      agree = agree && is_same;
    }
    if (agree) break;
    if (round + 1 == kMostRounds)
      throw_resource(
          "the hosts of this engine cannot begin a common epoch: other engines begin epochs in the same "
          "directories or stores at the same time, or this type of tier has no epoch IDs. Restart this "
          "engine");
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
    AllHostsOptions composed = options.all_hosts;
    composed.awaits_epoch = awaits_epoch[tier];
    composed.warn = links.event_sink();
    if (composed.awaits_epoch) {
      composed.warn(
          fmt::format("tier {} is out of service: the store does not respond on {}. The tier is used when "
                      "the stores of all hosts respond and have the same epoch",
                      remote.name, silent_hosts(ids, links, tier)));
    }
    opened.push_back(make_all_hosts_tier(std::move(parts), composed));
  }
  return opened;
}

}  // namespace kv_offload
