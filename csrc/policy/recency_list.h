// SPDX-License-Identifier: Apache-2.0
// RecencyList: a list of a table's nodes in the order in which they were linked. The nodes belong to the
// owner and carry the links: members `newer` and `older`, positions in the table or kNone. Every call is
// O(1). REQUIRES for each call: the same table.
#pragma once

#include <cstdint>

namespace kv_offload {

struct RecencyList {
  static constexpr std::uint32_t kNone = 0xFFFFFFFFu;

  std::uint32_t newest = kNone;
  std::uint32_t oldest = kNone;

  // REQUIRES: in no list.
  template <typename Table>
  void link_newest(Table& nodes, std::uint32_t at) {
    nodes[at].newer = kNone;
    nodes[at].older = newest;
    (newest == kNone ? oldest : nodes[newest].newer) = at;
    newest = at;
  }
  // REQUIRES: in no list.
  template <typename Table>
  void link_oldest(Table& nodes, std::uint32_t at) {
    nodes[at].older = kNone;
    nodes[at].newer = oldest;
    (oldest == kNone ? newest : nodes[oldest].older) = at;
    oldest = at;
  }
  // Links the node so that it is evicted right before `other`. REQUIRES: in no list; `other` is in this one.
  template <typename Table>
  void link_before(Table& nodes, std::uint32_t at, std::uint32_t other) {
    nodes[at].newer = other;
    nodes[at].older = nodes[other].older;
    (nodes[other].older == kNone ? oldest : nodes[nodes[other].older].newer) = at;
    nodes[other].older = at;
  }
  // REQUIRES: in this list. Leaves the links of the node itself unchanged.
  template <typename Table>
  void unlink(Table& nodes, std::uint32_t at) {
    const std::uint32_t newer = nodes[at].newer, older = nodes[at].older;
    (newer == kNone ? newest : nodes[newer].older) = older;
    (older == kNone ? oldest : nodes[older].newer) = newer;
  }
};

}  // namespace kv_offload
