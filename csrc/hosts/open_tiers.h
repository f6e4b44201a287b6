// SPDX-License-Identifier: Apache-2.0
// Opens the tiers of all hosts of an engine as tiers for the scheduler's cache.
//
// THE EPOCHS AGREE. A reset may reach only some of the hosts before the engine ends, and a directory may be
// replaced or be used by another engine. So the next engine compares the ids of the epochs that its hosts
// would use (EpochChoice). Unless all are equal, every host begins a new epoch with one new id. Otherwise a
// host that missed the reset would contribute a part of older weights to a chunk. A tier keeps the epoch that
// it opened until a reset of this engine, whatever its store keeps for later processes meanwhile.
//
// A store that cannot replace an epoch only if it is unchanged (Mooncake) keeps the epoch that it has. If the
// epochs of such stores differ, AllHostsTier resets them: each then has a new one with one random id, which
// this engine does not use. A store that replaced an epoch unconditionally by one that this engine uses could
// undo a reset, because the id follows from the earlier ones and may have been in use on another host.
//
// A store that does not respond delays only its tier: the tier is out of service until all hosts have an
// epoch and the epochs agree (AllHostsOptions::epoch_ids).
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
  Nanos timeout{std::chrono::minutes(2)};  // for all other hosts
  RemoteTierOptions remote{};              // without the name
  AllHostsOptions all_hosts{};
};

// `open_own`: opens the tiers of this host, each with its choice of an epoch. `text`: for the other hosts,
// see HostLinks::open_tiers. Throws as open_own, and ResourceError (another host cannot open its tiers; a
// kind of tier whose epochs have no id). REQUIRES: all hosts are connected.
Tiers open_on_all_hosts(HostLinks& links, const HostRegion& region, std::size_t tiers,
                        const std::function<Tiers(const std::vector<EpochChoice>& epochs)>& open_own,
                        const std::string& text, const OpenOptions& options);

}  // namespace kv_offload
