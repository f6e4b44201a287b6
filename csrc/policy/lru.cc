// SPDX-License-Identifier: Apache-2.0
#include "policy/lru.h"

#include <cassert>
#include <new>

#include "policy/expected_returns.h"

namespace kv_offload {

void LruPolicy::insert(Slot slot, const EntryInfo&) {
  nodes_.grow_to(std::size_t{slot} + 1);
  assert(nodes_[slot].place == Place::kUnknown);
  link_newest(slot);
}

void LruPolicy::access(Slot slot, const EntryInfo&) {
  unlink(slot);
  link_newest(slot);
}

void LruPolicy::erase(Slot slot) {
  unlink(slot);
  nodes_[slot] = Node{};
}

void LruPolicy::pin(Slot slot) {
  Node& node = nodes_[slot];
  assert(node.place != Place::kUnknown && !node.pinned);
  node.pinned = true;
  if (node.place == Place::kReturned) [[unlikely]]
    pin_returned(slot);
}

[[gnu::noinline]] void LruPolicy::pin_returned(Slot slot) {
  Node& node = nodes_[slot];
  returned_.erase({node.age, slot});
  node.place = Place::kParked;
}

void LruPolicy::unpin(Slot slot) {
  Node& node = nodes_[slot];
  assert(node.place != Place::kUnknown && node.pinned);
  node.pinned = false;
  if (node.place == Place::kParked) [[unlikely]]
    unpin_parked(slot);
}

[[gnu::noinline]] void LruPolicy::unpin_parked(Slot slot) {
  Node& node = nodes_[slot];
  try {
    returned_.insert({node.age, slot});
    node.place = Place::kReturned;
  } catch (const std::bad_alloc&) {
    link_newest(slot);
  }
}

std::optional<Slot> LruPolicy::victim() {
  if (!returned_.empty()) return returned_.begin()->second;
  while (list_.oldest != kNone && nodes_[list_.oldest].pinned) {
    const Slot slot = list_.oldest;
    unlink(slot);
    nodes_[slot].place = Place::kParked;
  }
  if (list_.oldest == kNone) return std::nullopt;
  return list_.oldest;
}

void LruPolicy::link_newest(Slot slot) {
  Node& node = nodes_[slot];
  node.place = Place::kList;
  node.age = ++last_age_;
  list_.link_newest(nodes_, slot);
}

void LruPolicy::unlink(Slot slot) {
  const Node& node = nodes_[slot];
  assert(node.place != Place::kUnknown);
  if (node.place == Place::kReturned) returned_.erase({node.age, slot});
  if (node.place == Place::kList) list_.unlink(nodes_, slot);
}

template class ExpectedReturns<LruPolicy>;

}  // namespace kv_offload
