// SPDX-License-Identifier: Apache-2.0
// AllHostsTier: one tier out of the tiers of all hosts of an engine. Each host has the part of a chunk that
// belongs to its own ranks, as a record of its own.
//
// All or nothing:
// - A chunk is present if every host has its part.
// - A read is ok if every host has read and verified its part; a write, if every host has stored its part.
//   Otherwise the op ends once, with the status that says most (damaged before missing before cancelled).
// - Parts that became useless are removed: those of a chunk whose part on another host was evicted, damaged
//   or not written. If a lookup finds that another host lacks its part, the part may still be on its way from
//   another engine that shares the records, so it has to stay missing for some time first. A failed write
//   removes parts only if it has written one of them, because the failing host may already have its part. It
//   removes none while another engine is writing a part (kUnavailable with EBUSY), because that engine may
//   have found the same on another host: both writes then fail, but the chunk becomes whole.
//   A removal that a host cannot take now, because it is lost or its disk fails, is repeated later, at most
//   once a second.
// - Keys that this host lacks are not looked up on other hosts: each chunk of a new prompt is one. If this
//   host lost records while the engine was down, the other parts stay until they are evicted, or until the
//   chunk is computed and stored again on all hosts.
//
// A removed chunk is reported when the first of its parts is removed, and at most once in each poll(). A key
// whose parts never formed a chunk may be reported too.
//
// An op takes as long as it takes on the slowest host. Its bytes are those of all parts. The same bytes and
// capacity are counted once for each host if the hosts share a directory.
//
// Threads: as for each Tier.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "tier/tier.h"

namespace kv_offload {

struct PartOfTier {
  std::unique_ptr<Tier> tier;
  double share = 1;              // of a chunk's bytes
  std::uint32_t first_rank = 0;  // of its host
};

struct AllHostsOptions {
  Nanos missing_for{std::chrono::minutes(1)};  // until the other parts are removed
  const Clock* clock = nullptr;                // must outlive the tier; null: a steady clock
  // The epoch ids of the parts, 0 for none, if a part has no epoch yet, because its store does not respond,
  // or if the ids differ and the stores keep them. The tier is then out of service until all parts have one
  // and the ids are equal, or until a reset. Ids that differ are reported at once, even while other parts
  // have none: a part keeps its epoch.
  std::vector<std::uint64_t> epoch_ids{};
  std::function<void(std::string)> warn{};  // receives log lines; must be set if epoch_ids is
};

// The first part is that of this host: it is asked first, and has the name and the codec of the whole tier.
// REQUIRES: at least one part; all of them can remove single records (RecordStore::remove).
std::unique_ptr<Tier> make_all_hosts_tier(std::vector<PartOfTier> parts, const AllHostsOptions& options = {});

}  // namespace kv_offload
