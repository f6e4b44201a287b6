// SPDX-License-Identifier: Apache-2.0
// Opens the tiers of all hosts of an engine as tiers for the scheduler's cache.
//
// THE EPOCHS AGREE. A reset may reach only some of the hosts before the engine ends. So the next engine
// compares the numbers of the epochs that its hosts would use, and all of them use the highest (see
// FsTierOptions::least_epoch). Otherwise a host that missed the reset would contribute a part of older
// weights to a chunk.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "hosts/all_hosts_tier.h"
#include "hosts/host_links.h"
#include "memory/host_region.h"
#include "tier/tier.h"

namespace kv_offload {

using Tiers = std::vector<std::unique_ptr<Tier>>;

struct OpenOptions {
  Nanos timeout{std::chrono::minutes(2)};  // for all hosts
  RemoteTierOptions remote{};              // without the name
  AllHostsOptions all_hosts{};
};

// `open_own`: opens the tiers of this host, none of which uses an epoch below least_epochs[tier]. `text`: for
// the other hosts, see HostLinks::open_tiers. Throws as open_own, and ResourceError (another host cannot open
// its tiers; a kind of tier without numbered epochs). REQUIRES: all hosts are connected.
Tiers open_on_all_hosts(HostLinks& links, const HostRegion& region, std::size_t tiers,
                        const std::function<Tiers(const std::vector<std::uint64_t>& least_epochs)>& open_own,
                        const std::string& text, const OpenOptions& options);

}  // namespace kv_offload
