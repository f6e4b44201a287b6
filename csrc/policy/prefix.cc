// SPDX-License-Identifier: Apache-2.0
#include "policy/prefix.h"

#include <algorithm>
#include <bit>
#include <cassert>

namespace kv_offload {
namespace {

constexpr std::uint64_t kAdvanceEvery = 16;  // uses
constexpr std::uint64_t kLearnEvery = 8;
constexpr float kKeep = 0.993f;        // weight of a class's learned data after each of its turns
constexpr std::uint64_t kHorizon = 8;  // times the number of entries
constexpr std::uint64_t kMinHorizon = 4096;
constexpr float kClearlyLess = 0.5f;

}  // namespace

void PrefixPolicy::insert(Slot slot, const EntryInfo& info) {
  nodes_.grow_to(std::size_t{slot} + 1);
  assert(nodes_[slot].place == Place::kUnknown);
  ++known_;
  ++now_;
  Node& node = nodes_[slot];
  node = Node{};
  try {
    on_use(node);
    node.record = classes_.refer(info.request);
    node.tree = tree_.take(info.id, info.parent, slot);
    node.used = sampler_.is_tracked(info.id);
    if (node.record != 0) classes_.on_stored(node.record, sampler_.sampled(info.id), node.used);
    sampler_.used(info.id, use_of(node));
    if (info.parent != 0) sampler_.extended(info.parent, node.record);
    if (!has_children(node)) put_leaf(slot);  // the last call that may throw
  } catch (...) {
    forget(node);
    throw;
  }
  demote_parent(node);
  if (has_children(node)) put(slot);
}

void PrefixPolicy::forget(Node& node) {
  if (node.tree != PrefixTree::kNone) tree_.leave(node.tree);
  classes_.release(node.record);
  node = Node{};
  --known_;
}

void PrefixPolicy::demote_parent(const Node& node) {
  const Slot parent = parent_of(node);
  if (parent == kNone || nodes_[parent].place != Place::kLeaf) return;
  unlink(parent);
  put(parent);
}

void PrefixPolicy::access(Slot slot, const EntryInfo& info) {
  Node& node = nodes_[slot];
  assert(node.place != Place::kUnknown);
  if (node.tree != PrefixTree::kNone && info.parent != 0) {  // an entry found in a directory had none
    tree_.set_parent(node.tree, info.parent);
    demote_parent(node);
  }
  if (classes_.is_of(node.record, info.request)) return refresh(slot, info);  // not a reuse: the same request
  if (node.place != Place::kPinned) unlink(slot);
  const RequestClasses::Record before = node.record;
  node.record = classes_.refer(info.request);
  node.used = true;
  on_use(node);
  if (!is_branched(node)) classes_.on_return(node.record);
  sampler_.used(info.id, use_of(node));
  classes_.release(before);
  if (node.place != Place::kPinned) put(slot);
}

void PrefixPolicy::refresh(Slot slot, const EntryInfo& info) {
  Node& node = nodes_[slot];
  assert(node.place != Place::kUnknown);
  if (node.place != Place::kPinned) unlink(slot);
  on_use(node);
  sampler_.renewed(info.id, use_of(node));
  if (node.place != Place::kPinned) put(slot);
}

void PrefixPolicy::erase(Slot slot) {
  Node& node = nodes_[slot];
  assert(node.place != Place::kUnknown);
  if (node.place != Place::kPinned) unlink(slot);
  const Slot parent = parent_of(node);
  forget(node);
  if (parent != kNone && nodes_[parent].place == Place::kInner) {
    unlink(parent);
    put(parent);
  }
}

void PrefixPolicy::set_recorded(Slot slot, bool recorded) {
  Node& node = nodes_[slot];
  assert(node.place != Place::kUnknown);
  if (node.place != Place::kLeaf) {
    node.recorded = recorded;
  } else if (node.recorded != recorded) {
    unlink(slot);
    node.recorded = recorded;
    put_leaf(slot);
  }
}

void PrefixPolicy::pin(Slot slot) {
  assert(nodes_[slot].place == Place::kLeaf || nodes_[slot].place == Place::kInner);
  unlink(slot);
  nodes_[slot].place = Place::kPinned;
}

void PrefixPolicy::unpin(Slot slot) {
  assert(nodes_[slot].place == Place::kPinned);
  put(slot);
}

std::optional<Slot> PrefixPolicy::victim() {
  struct Best {
    unsigned kind = 0, bucket = 0;
    float worth = 0;
    std::uint64_t use = 0;
  };
  for (int moves = kMaxMoves;;) {
    std::optional<Best> least, oldest;
    bool moved = false;
    for (unsigned kind = 0; kind < kKinds; ++kind) {
      for (std::uint64_t left = filled_[kind]; left != 0; left &= left - 1) {
        const auto b = static_cast<unsigned>(std::countr_zero(left));
        if (oldest_[kind][b].due <= now_ && moves > 0) moved |= settle_oldest(kind, b, &moves);
        if ((filled_[kind] >> b & 1) == 0) continue;
        const Best candidate{kind, b, worth(kind, b), oldest_[kind][b].use};
        if (!least || candidate.worth < least->worth) least = candidate;
        if (!oldest || candidate.use < oldest->use) oldest = candidate;
      }
    }
    // A leaf moved into a set that was checked before.
    if (moved) continue;
    if (!least) return inner_.oldest == kNone ? std::nullopt : std::optional(inner_.oldest);
    const Best& best = least->worth < kClearlyLess * oldest->worth ? *least : *oldest;
    if (settle_oldest(best.kind, best.bucket, &moves)) continue;  // its request's class has changed
    return leaves_[best.kind][best.bucket].begin()->second;
  }
}

void PrefixPolicy::set_aside(Slot slot) {
  pin(slot);
  const Node& node = nodes_[slot];
  if (node.tree != PrefixTree::kNone) tree_.hide(node.tree);
  const Slot parent = parent_of(node);
  if (parent == kNone || nodes_[parent].place != Place::kInner || has_children(nodes_[parent])) return;
  unlink(parent);
  put_leaf(parent);
}

// An entry with children returns to the old end of the inner list. It was taken from there, or would be taken
// from there once no leaf is left.
void PrefixPolicy::put_back(Slot slot) {
  const Node& node = nodes_[slot];
  if (node.tree != PrefixTree::kNone) tree_.show(node.tree);
  const Slot parent = parent_of(node);
  if (parent != kNone && nodes_[parent].place == Place::kLeaf) {
    unlink(parent);
    put_oldest_inner(parent);
  }
  has_children(node) ? put_oldest_inner(slot) : put_leaf(slot);
}

void PrefixPolicy::put_oldest_inner(Slot slot) {
  nodes_[slot].place = Place::kInner;
  inner_.link_oldest(nodes_, slot);
}

// Moves the oldest leaves of a set to the sets where they belong now. Returns whether any moved.
bool PrefixPolicy::settle_oldest(unsigned kind, unsigned bucket, int* moves) {
  const Leaves& set = leaves_[kind][bucket];
  for (bool moved = false;; moved = true) {
    if (set.empty() || *moves == 0) return moved;
    const Slot slot = set.begin()->second;
    const Node& node = nodes_[slot];
    if (kind_of(node) == kind && ReusePredictor::bucket_of(now_ - node.time) == bucket) return moved;
    --*moves;
    unlink(slot);
    put_leaf(slot);
  }
}

void PrefixPolicy::on_use(Node& node) {
  node.time = now_;
  node.use = ++uses_;
  if (uses_ % kAdvanceEvery == 0) sampler_.advance(now_, std::max(kMinHorizon, kHorizon * known_));
  if (uses_ % kLearnEvery == 0) predictor_.learn(kKeep);
}

Slot PrefixPolicy::parent_of(const Node& node) const {
  const PrefixTree::Node above = node.tree == PrefixTree::kNone ? PrefixTree::kNone : tree_.parent(node.tree);
  return above == PrefixTree::kNone ? kNone : tree_.slot(above);
}

void PrefixPolicy::put(Slot slot) {
  Node& node = nodes_[slot];
  if (!has_children(node)) return put_leaf(slot);
  node.place = Place::kInner;
  // Within one prompt the deepest chunk is evicted first, also if the prompt's head was used or unpinned
  // earlier.
  const Slot above = parent_of(node);
  if (above != kNone && nodes_[above].place == Place::kInner && is_as_recent(nodes_[above], node))
    return inner_.link_before(nodes_, slot, above);
  inner_.link_newest(nodes_, slot);
}

void PrefixPolicy::put_leaf(Slot slot) {
  Node& node = nodes_[slot];
  node.place = Place::kLeaf;
  node.kind = static_cast<std::uint8_t>(kind_of(node));
  node.bucket = static_cast<std::uint8_t>(ReusePredictor::bucket_of(now_ - node.time));
  const auto at = leaves_[node.kind][node.bucket].insert({node.use, slot}).first;
  filled_[node.kind] |= std::uint64_t{1} << node.bucket;
  if (at == leaves_[node.kind][node.bucket].begin()) cache_oldest(node.kind, node.bucket);
}

void PrefixPolicy::unlink(Slot slot) {
  const Node& node = nodes_[slot];
  if (node.place == Place::kLeaf) {
    Leaves& set = leaves_[node.kind][node.bucket];
    set.erase({node.use, slot});
    if (set.empty()) {
      filled_[node.kind] &= ~(std::uint64_t{1} << node.bucket);
    } else if (oldest_[node.kind][node.bucket].use == node.use) {
      cache_oldest(node.kind, node.bucket);
    }
  } else if (node.place == Place::kInner) {
    inner_.unlink(nodes_, slot);
  }
}

void PrefixPolicy::cache_oldest(unsigned kind, unsigned bucket) {
  const auto& [use, slot] = *leaves_[kind][bucket].begin();
  oldest_[kind][bucket] = {use, nodes_[slot].time + ReusePredictor::edge(bucket + 1)};
}

}  // namespace kv_offload
