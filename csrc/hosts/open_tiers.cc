// SPDX-License-Identifier: Apache-2.0
#include "hosts/open_tiers.h"

#include <algorithm>
#include <utility>

#include "base/status.h"
#include "tier/epoch_registry.h"

namespace kv_offload {
namespace {

constexpr int kMostRounds = 8;  // more than two only if other engines begin epochs at the same time

using OpenedByHost = std::vector<std::vector<OpenedTier>>;  // [host][tier]; the other hosts, then this one

// Returns the same id for the same epochs: engines that start at once, and find each other's, then agree.
std::uint64_t next_id(const OpenedByHost& hosts, std::size_t tier) {
  std::uint64_t mixed = 0;
  for (const auto& of_host : hosts) {
    if (of_host[tier].epoch_id == 0) return EpochRegistry::new_id();
    mixed = (mixed ^ of_host[tier].epoch_id) * 0x9E3779B97F4A7C15;
    mixed ^= mixed >> 32;
  }
  return std::max<std::uint64_t>(mixed, 1);
}

// True if the host still has the epoch that it was to replace: its store cannot do so safely.
bool keeps_epoch(const EpochChoice& choice, const OpenedTier& opened) {
  return choice.is_new && choice.replaces != 0 && opened.epoch_id == choice.replaces;
}

// A store may send any bytes in an error; the log is text.
std::string printable(std::string text) {
  text.resize(std::min(text.size(), kMostEpochProblem));
  std::replace_if(
      text.begin(), text.end(), [](char c) { return c < ' ' || c > '~'; }, '?');
  return text;
}

// "the host of rank 0 (localhost:6379: cannot connect: Connection refused)"
std::string silent_host(std::uint32_t first_rank, const OpenedTier& tier) {
  const std::string reason =
      tier.epoch_problem.empty() ? "" : fmt::format(" ({})", printable(tier.epoch_problem));
  return fmt::format("the host of rank {}{}", first_rank, reason);
}

double bytes_of(const HostRegion& region, std::uint32_t first_rank, std::uint32_t ranks) {
  double bytes = 0;
  for (std::uint32_t i = 0; i < ranks; ++i) {
    for (const std::uint64_t shard : region.geometry(first_rank + i).shard_bytes)
      bytes += static_cast<double>(shard);
  }
  return bytes;
}

// By group.
std::vector<std::uint64_t> group_bytes_of(const HostRegion& region, const RemoteHost& host) {
  std::vector<std::uint64_t> bytes;
  for (std::uint32_t i = 0; i < host.ranks; ++i) {
    const std::vector<std::uint64_t> of_rank = region.geometry(host.first_rank + i).shard_bytes;
    bytes.resize(std::max(bytes.size(), of_rank.size()));
    for (std::size_t group = 0; group < of_rank.size(); ++group) bytes[group] += of_rank[group];
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
  OpenedByHost hosts;
  const SteadyClock clock;
  const Nanos end = clock.now() + options.timeout;
  for (int round = 0;; ++round) {
    own.clear();
    own = open_own(own_choices);
    hosts = links.open_tiers(text, choices, end - clock.now());
    std::vector<OpenedTier>& own_opened = hosts.emplace_back();
    for (const auto& tier : own) own_opened.push_back(opened(*tier));
    bool agree = true;
    for (std::size_t tier = 0; tier < tiers; ++tier) {
      // The choice stays: hosts whose stores have no epoch begin one with the same id, also later.
      awaits_epoch[tier] = std::any_of(hosts.begin(), hosts.end(),
                                       [&](const auto& of_host) { return of_host[tier].awaits_epoch; });
      if (awaits_epoch[tier]) continue;
      const std::uint64_t own_id = own_opened[tier].epoch_id;
      const bool is_same = std::all_of(hosts.begin(), hosts.end(), [&](const auto& of_host) {
        return of_host[tier].epoch_id != 0 && of_host[tier].epoch_id == own_id;
      });
      bool keeps = keeps_epoch(own_choices[tier], own_opened[tier]);
      for (std::size_t host = 0; host < choices.size(); ++host)
        keeps = keeps || keeps_epoch(choices[host][tier], hosts[host][tier]);
      // Hosts that may not write cannot replace their epochs: another engine does. A store that keeps its
      // epoch gets another one by a reset.
      awaits_epoch[tier] = !is_same && (keeps || !own[tier]->can_reset());
      if (awaits_epoch[tier]) continue;
      // If all hosts agree on a tier, the next round opens the same epoch. If a store loses it meanwhile, it
      // gets an unused id.
      const std::uint64_t next = is_same ? EpochRegistry::new_id() : next_id(hosts, tier);
      for (std::size_t host = 0; host < choices.size(); ++host)
        choices[host][tier] = {next, !is_same, hosts[host][tier].epoch_id};
      own_choices[tier] = {next, !is_same, own_id};
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
    std::vector<std::uint64_t> epoch_ids;
    std::vector<std::string> silent, empty;
    const bool is_read_only = !own[tier]->can_reset();
    const auto add = [&](std::unique_ptr<Tier> part, std::uint32_t first_rank, std::uint32_t ranks,
                         const OpenedTier& state) {
      parts.push_back({std::move(part), share(first_rank, ranks), first_rank});
      epoch_ids.push_back(state.epoch_id);
      const bool responds = is_read_only && state.epoch_problem.empty();
      if (state.awaits_epoch) (responds ? empty : silent).push_back(silent_host(first_rank, state));
    };
    add(std::move(own[tier]), region.first_rank(), region.local_ranks(), hosts.back()[tier]);
    for (std::size_t host = 0; host < links.num_hosts(); ++host) {
      const RemoteHost other = links.host(host);
      remote.group_bytes = group_bytes_of(region, other);
      add(links.remote_tier(host, static_cast<std::uint8_t>(tier), remote), other.first_rank, other.ranks,
          hosts[host][tier]);
    }
    AllHostsOptions composed = options.all_hosts;
    composed.warn = links.event_sink();
    if (awaits_epoch[tier]) {
      composed.epoch_ids = std::move(epoch_ids);
    }
    if (!silent.empty()) {
      composed.warn(
          fmt::format("tier {} is out of service: the store does not respond on {}. The tier is used when "
                      "the stores of all hosts respond and have the same epoch",
                      remote.name, fmt::join(silent, ", ")));
    } else if (!empty.empty()) {
      composed.warn(fmt::format(
          "tier {} is out of service: there is no epoch in the store of {}, and this engine may "
          "not begin one (write_policy is read_only). The tier is used when an engine that writes "
          "has begun a common epoch",
          remote.name, fmt::join(empty, ", ")));
    }
    opened.push_back(make_all_hosts_tier(std::move(parts), composed));
  }
  return opened;
}

}  // namespace kv_offload
