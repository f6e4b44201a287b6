// SPDX-License-Identifier: Apache-2.0
// OutsideChanges: signs that another program changed a root while servers use it: known records that are
// missing or incomplete. Readers, the evictor and PeerRecords report them; UsageScanner counts the root.
//
// A missing record alone proves nothing while other servers have the root open, because they evict too.
//
// Threads: any.
#pragma once

#include <atomic>
#include <cstdint>

namespace kv_offload {

class OutsideChanges {
 public:
  void add_missing(std::uint64_t records = 1) { missing_.fetch_add(records); }
  // Running total.
  std::uint64_t missing() const { return missing_.load(); }
  // True if missing records were found that no count has explained yet: the sum of the root may be too high.
  bool suspected() const { return missing_.load() != explained_.load(); }
  void explain(std::uint64_t missing) { explained_.store(missing); }
  std::uint64_t explained() const { return explained_.load(); }

  // Statistics; running totals.
  void add_rebuild() { rebuilds_.fetch_add(1); }
  void add_lost_bytes(std::uint64_t bytes) { lost_bytes_.fetch_add(bytes); }
  std::uint64_t rebuilds() const { return rebuilds_.load(); }
  std::uint64_t lost_bytes() const { return lost_bytes_.load(); }

 private:
  std::atomic<std::uint64_t> missing_{0}, explained_{0}, rebuilds_{0}, lost_bytes_{0};
};

}  // namespace kv_offload
