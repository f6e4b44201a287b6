// SPDX-License-Identifier: Apache-2.0
#include "policy/prefix.h"

#include <algorithm>
#include <bit>
#include <cassert>
#include <new>

#include "policy/expected_returns.h"

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
  Node next = node;
  next.record = classes_.refer(info.request);
  try {
    next.used = true;
    on_use(next);
    if (!is_branched(next)) classes_.on_return(next.record);
    sampler_.used(info.id, use_of(next));
  } catch (...) {
    classes_.release(next.record);
    throw;
  }
  classes_.release(node.record);
  move_to(slot, next);
}

void PrefixPolicy::refresh(Slot slot, const EntryInfo& info) {
  assert(nodes_[slot].place != Place::kUnknown);
  Node next = nodes_[slot];
  on_use(next);
  sampler_.renewed(info.id, use_of(next));
  move_to(slot, next);
}

void PrefixPolicy::identify(Slot slot, const EntryInfo& info) {
  assert(nodes_[slot].place != Place::kUnknown);
  if (nodes_[slot].tree != PrefixTree::kNone) return refresh(slot, info);
  ++now_;
  Node next = nodes_[slot];
  on_use(next);
  next.tree = tree_.take(info.id, info.parent, slot);
  try {
    next.used = sampler_.is_tracked(info.id);
    sampler_.used(info.id, use_of(next));
  } catch (...) {
    if (next.tree != PrefixTree::kNone) tree_.leave(next.tree);
    throw;
  }
  move_to(slot, next);
  demote_parent(nodes_[slot]);
}

void PrefixPolicy::move_to(Slot slot, const Node& next) {
  Node& node = nodes_[slot];
  const bool pinned = node.place == Place::kPinned;
  Leaves::node_type leaf = take_out(slot);
  node.use = next.use;
  node.time = next.time;
  node.tree = next.tree;
  node.record = next.record;
  node.used = next.used;
  if (pinned) return;
  try {
    put(slot, std::move(leaf));
  } catch (const std::bad_alloc&) {  // an entry without children that was evicted like an inner one stays so
    node.place = Place::kInner;
    inner_.link_newest(nodes_, slot);
  }
}

void PrefixPolicy::erase(Slot slot) {
  Node& node = nodes_[slot];
  assert(node.place != Place::kUnknown);
  Leaves::node_type leaf = take_out(slot);
  const Slot parent = parent_of(node);
  forget(node);
  if (parent == kNone || nodes_[parent].place != Place::kInner) return;
  if (!has_children(nodes_[parent])) {
    if (leaf.empty()) leaf = try_make_leaf();
    if (leaf.empty()) return;  // it is evicted like an inner one until its next use
  }
  unlink(parent);
  put(parent, std::move(leaf));
}

void PrefixPolicy::set_recorded(Slot slot, bool recorded) {
  Node& node = nodes_[slot];
  assert(node.place != Place::kUnknown);
  if (node.place != Place::kLeaf) {
    node.recorded = recorded;
  } else if (node.recorded != recorded) {
    Leaves::node_type leaf = take_out(slot);
    node.recorded = recorded;
    put_leaf(slot, std::move(leaf));
  }
}

void PrefixPolicy::pin(Slot slot) {
  assert(nodes_[slot].place == Place::kLeaf || nodes_[slot].place == Place::kInner);
  unlink(slot);
  nodes_[slot].place = Place::kPinned;
}

void PrefixPolicy::unpin(Slot slot) {
  assert(nodes_[slot].place == Place::kPinned);
  put_or_oldest_inner(slot, {});
}

void PrefixPolicy::put_or_oldest_inner(Slot slot, Leaves::node_type leaf) {
  try {
    put(slot, std::move(leaf));
  } catch (const std::bad_alloc&) {
    put_oldest_inner(slot);
  }
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
  Node& node = nodes_[slot];
  assert(node.place == Place::kLeaf || node.place == Place::kInner);
  Leaves::node_type leaf = take_out(slot);
  node.place = Place::kPinned;
  if (node.tree != PrefixTree::kNone) tree_.hide(node.tree);
  const Slot parent = parent_of(node);
  if (parent == kNone || nodes_[parent].place != Place::kInner || has_children(nodes_[parent])) {
    aside_.insert(std::move(leaf));
    return;
  }
  // The parent uses the entry's leaf, and put_back() returns it. Without a leaf it stays an inner entry.
  if (leaf.empty()) leaf = try_make_leaf();
  if (leaf.empty()) return;
  inner_.unlink(nodes_, parent);
  put_leaf(parent, std::move(leaf));
}

// An entry with children returns to the old end of the inner list. It was taken from there, or would be taken
// from there once no leaf is left.
void PrefixPolicy::put_back(Slot slot) {
  const Node& node = nodes_[slot];
  if (node.tree != PrefixTree::kNone) tree_.show(node.tree);
  Leaves::node_type leaf = aside_.extract({node.use, slot});
  const Slot parent = parent_of(node);
  if (parent != kNone && nodes_[parent].place == Place::kLeaf) {
    Leaves::node_type of_parent = take_out(parent);
    if (leaf.empty()) leaf = std::move(of_parent);
    put_oldest_inner(parent);
  }
  if (has_children(node)) return put_oldest_inner(slot);
  put_or_oldest_inner(slot, std::move(leaf));
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
    Leaves::node_type leaf = take_out(slot);
    put_leaf(slot, std::move(leaf));
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
  put(slot, has_children(nodes_[slot]) ? Leaves::node_type() : make_leaf());
}

void PrefixPolicy::put(Slot slot, Leaves::node_type leaf) {
  Node& node = nodes_[slot];
  if (!has_children(node)) return put_leaf(slot, leaf.empty() ? make_leaf() : std::move(leaf));
  node.place = Place::kInner;
  // Within one prompt the deepest chunk is evicted first, even if the prompt's head was used or unpinned
  // earlier.
  const Slot above = parent_of(node);
  if (above != kNone && nodes_[above].place == Place::kInner && is_as_recent(nodes_[above], node))
    return inner_.link_before(nodes_, slot, above);
  inner_.link_newest(nodes_, slot);
}

PrefixPolicy::Leaves::node_type PrefixPolicy::make_leaf() {
  Leaves made;
  return made.extract(made.emplace().first);
}

PrefixPolicy::Leaves::node_type PrefixPolicy::try_make_leaf() {
  try {
    return make_leaf();
  } catch (const std::bad_alloc&) {
    return {};
  }
}

void PrefixPolicy::put_leaf(Slot slot, Leaves::node_type leaf) {
  Node& node = nodes_[slot];
  node.place = Place::kLeaf;
  node.kind = static_cast<std::uint8_t>(kind_of(node));
  node.bucket = static_cast<std::uint8_t>(ReusePredictor::bucket_of(now_ - node.time));
  leaf.value() = {node.use, slot};
  const auto at = leaves_[node.kind][node.bucket].insert(std::move(leaf)).position;
  filled_[node.kind] |= std::uint64_t{1} << node.bucket;
  if (at == leaves_[node.kind][node.bucket].begin()) cache_oldest(node.kind, node.bucket);
}

void PrefixPolicy::unlink(Slot slot) { (void)take_out(slot); }

PrefixPolicy::Leaves::node_type PrefixPolicy::take_out(Slot slot) {
  const Node& node = nodes_[slot];
  if (node.place == Place::kInner) inner_.unlink(nodes_, slot);
  if (node.place != Place::kLeaf) return {};
  Leaves& set = leaves_[node.kind][node.bucket];
  Leaves::node_type leaf = set.extract({node.use, slot});
  if (set.empty()) {
    filled_[node.kind] &= ~(std::uint64_t{1} << node.bucket);
  } else if (oldest_[node.kind][node.bucket].use == node.use) {
    cache_oldest(node.kind, node.bucket);
  }
  return leaf;
}

void PrefixPolicy::cache_oldest(unsigned kind, unsigned bucket) {
  const auto& [use, slot] = *leaves_[kind][bucket].begin();
  oldest_[kind][bucket] = {use, nodes_[slot].time + ReusePredictor::edge(bucket + 1)};
}

template class ExpectedReturns<PrefixPolicy>;

}  // namespace kv_offload
