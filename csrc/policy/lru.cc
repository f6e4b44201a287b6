#include "policy/lru.h"

#include <cassert>

namespace kv_offload {

LruPolicy::LruPolicy(std::size_t capacity_hint) { nodes_.reserve(capacity_hint); }

void LruPolicy::insert(Slot slot, const EntryInfo&) {
  if (slot >= nodes_.size()) nodes_.resize(std::size_t{slot} + 1);
  assert(!nodes_[slot].known);
  nodes_[slot].known = true;
  link_newest(slot);
}

void LruPolicy::access(Slot slot) {
  Node& node = nodes_[slot];
  assert(node.known);
  if (node.parked) {
    node.parked = false;
  } else {
    unlink(slot);
  }
  link_newest(slot);
}

void LruPolicy::erase(Slot slot) {
  assert(nodes_[slot].known);
  if (!nodes_[slot].parked) unlink(slot);
  nodes_[slot] = Node{};
}

void LruPolicy::pin(Slot slot) {
  assert(nodes_[slot].known && !nodes_[slot].pinned);
  nodes_[slot].pinned = true;
}

void LruPolicy::unpin(Slot slot) {
  Node& node = nodes_[slot];
  assert(node.known && node.pinned);
  node.pinned = false;
  if (node.parked) {
    node.parked = false;
    link_oldest(slot);
  }
}

std::optional<Slot> LruPolicy::victim() {
  while (oldest_ != kNone && nodes_[oldest_].pinned) {
    const Slot slot = oldest_;
    unlink(slot);
    nodes_[slot].parked = true;
  }
  if (oldest_ == kNone) return std::nullopt;
  return oldest_;
}

void LruPolicy::link_newest(Slot slot) {
  nodes_[slot].newer = kNone;
  nodes_[slot].older = newest_;
  if (newest_ != kNone) nodes_[newest_].newer = slot;
  newest_ = slot;
  if (oldest_ == kNone) oldest_ = slot;
}

void LruPolicy::link_oldest(Slot slot) {
  nodes_[slot].older = kNone;
  nodes_[slot].newer = oldest_;
  if (oldest_ != kNone) nodes_[oldest_].older = slot;
  oldest_ = slot;
  if (newest_ == kNone) newest_ = slot;
}

void LruPolicy::unlink(Slot slot) {
  const Node& node = nodes_[slot];
  (node.newer == kNone ? newest_ : nodes_[node.newer].older) = node.older;
  (node.older == kNone ? oldest_ : nodes_[node.older].newer) = node.newer;
}

}  // namespace kv_offload
