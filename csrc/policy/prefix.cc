#include "policy/prefix.h"

#include <algorithm>
#include <bit>
#include <cassert>

namespace kv_offload {
namespace {

constexpr std::uint64_t kAdvanceEvery = 16;  // uses
constexpr std::uint64_t kLearnEvery = 32;
constexpr float kKeep = 0.993f;        // of what was learned, each time
constexpr std::uint64_t kHorizon = 8;  // times the number of entries
constexpr std::uint64_t kMinHorizon = 4096;
constexpr float kClearlyLess = 0.5f;
constexpr float kRising = 1.05f;

}  // namespace

void PrefixPolicy::insert(Slot slot, const EntryInfo& info) {
  if (slot >= nodes_.size()) nodes_.resize(std::size_t{slot} + 1);
  assert(nodes_[slot].place == Place::kUnknown);
  ++known_;
  ++now_;
  Node& node = nodes_[slot];
  node = Node{};
  note_use(node);
  node.record = classes_.refer(info.request);
  node.tree = tree_.take(info.id, info.parent, slot);
  if (node.record != 0) {
    classes_.note_stored(node.record, history_.sampled(info.id), history_.knows(info.id));
  }
  history_.used(info.id, node.record, now_, is_branched(node));
  no_leaf_above(node);
  put(slot);
}

void PrefixPolicy::no_leaf_above(const Node& node) {
  const Slot parent = parent_of(node);
  if (parent == kNone || nodes_[parent].place != Place::kLeaf) return;
  lift(parent);
  put(parent);
}

void PrefixPolicy::access(Slot slot, const EntryInfo& info) {
  Node& node = nodes_[slot];
  assert(node.place != Place::kUnknown);
  if (node.tree != PrefixTree::kNone && info.parent != 0) {  // what a directory has told is told without
    tree_.set_parent(node.tree, info.parent);
    no_leaf_above(node);
  }
  if (classes_.is_of(node.record, info.request)) return refresh(slot, info);  // no return: it is still there
  if (node.place != Place::kPinned) lift(slot);
  const RequestClasses::Record before = node.record;
  node.record = classes_.refer(info.request);
  note_use(node);
  const bool branched = is_branched(node);
  if (!branched) classes_.note_return(node.record);
  history_.used(info.id, node.record, now_, branched);
  classes_.release(before);
  if (node.place != Place::kPinned) put(slot);
}

void PrefixPolicy::refresh(Slot slot, const EntryInfo& info) {
  Node& node = nodes_[slot];
  assert(node.place != Place::kUnknown);
  if (node.place != Place::kPinned) lift(slot);
  note_use(node);
  history_.renewed(info.id, node.record, now_);
  if (node.place != Place::kPinned) put(slot);
}

void PrefixPolicy::erase(Slot slot) {
  Node& node = nodes_[slot];
  assert(node.place != Place::kUnknown);
  if (node.place != Place::kPinned) lift(slot);
  const Slot parent = parent_of(node);
  if (node.tree != PrefixTree::kNone) tree_.leave(node.tree);
  if (parent != kNone && nodes_[parent].place == Place::kInner) {
    lift(parent);
    put(parent);
  }
  classes_.release(node.record);
  node = Node{};
  --known_;
}

void PrefixPolicy::pin(Slot slot) {
  assert(nodes_[slot].place == Place::kLeaf || nodes_[slot].place == Place::kInner);
  lift(slot);
  nodes_[slot].place = Place::kPinned;
}

void PrefixPolicy::unpin(Slot slot) {
  assert(nodes_[slot].place == Place::kPinned);
  put(slot);
}

std::optional<Slot> PrefixPolicy::victim() {
  struct Best {
    const Leaves* set = nullptr;
    float worth = 0;
    bool rising = false;  // with age
  };
  int moves = kMaxMoves;
  Best least, oldest;
  for (unsigned c = 0; c < ReturnModel::kClasses; ++c) {
    for (std::uint64_t left = filled_[c]; left != 0; left &= left - 1) {
      settle_oldest(c, static_cast<unsigned>(std::countr_zero(left)), &moves);
    }
  }
  for (unsigned c = 0; c < ReturnModel::kClasses; ++c) {
    for (std::uint64_t left = filled_[c]; left != 0; left &= left - 1) {
      const auto b = static_cast<unsigned>(std::countr_zero(left));
      const float worth = model_.worth(c, b);
      const bool rising = b + 1 < ReturnModel::kBuckets && model_.worth(c, b + 1) > kRising * worth;
      const Best here{&leaves_[c][b], worth, rising};
      if (least.set == nullptr || worth < least.worth) least = here;
      if (oldest.set == nullptr || *here.set->begin() < *oldest.set->begin()) oldest = here;
    }
  }
  if (least.set == nullptr) return inner_.oldest == kNone ? std::nullopt : std::optional(inner_.oldest);
  if (least.worth >= kClearlyLess * oldest.worth) return oldest.set->begin()->second;
  // What becomes worth more with age is let go before it has.
  return least.rising ? least.set->rbegin()->second : least.set->begin()->second;
}

// Moves the oldest leaves of a set to where they belong by now.
void PrefixPolicy::settle_oldest(unsigned of_class, unsigned bucket, int* moves) {
  const Leaves& set = leaves_[of_class][bucket];
  while (!set.empty() && *moves > 0) {
    const Slot slot = set.begin()->second;
    const Node& node = nodes_[slot];
    if (classes_.class_of(node.record) == of_class && ReturnModel::bucket_of(now_ - node.time) == bucket) {
      return;
    }
    --*moves;
    lift(slot);
    put_leaf(slot);
  }
}

void PrefixPolicy::note_use(Node& node) {
  node.time = now_;
  node.use = ++uses_;
  if (uses_ % kAdvanceEvery == 0) history_.advance(now_, std::max(kMinHorizon, kHorizon * known_));
  if (uses_ % kLearnEvery == 0) model_.learn(kKeep);
}

Slot PrefixPolicy::parent_of(const Node& node) const {
  const PrefixTree::Node above = node.tree == PrefixTree::kNone ? PrefixTree::kNone : tree_.parent(node.tree);
  return above == PrefixTree::kNone ? kNone : tree_.slot(above);
}

void PrefixPolicy::put(Slot slot) {
  Node& node = nodes_[slot];
  if (!has_children(node)) return put_leaf(slot);
  node.place = Place::kInner;
  inner_.link_newest(nodes_, slot);
}

void PrefixPolicy::put_leaf(Slot slot) {
  Node& node = nodes_[slot];
  node.place = Place::kLeaf;
  node.of_class = static_cast<std::uint8_t>(classes_.class_of(node.record));
  node.bucket = static_cast<std::uint8_t>(ReturnModel::bucket_of(now_ - node.time));
  leaves_[node.of_class][node.bucket].insert({node.use, slot});
  filled_[node.of_class] |= std::uint64_t{1} << node.bucket;
}

void PrefixPolicy::lift(Slot slot) {
  const Node& node = nodes_[slot];
  if (node.place == Place::kLeaf) {
    Leaves& set = leaves_[node.of_class][node.bucket];
    set.erase({node.use, slot});
    if (set.empty()) filled_[node.of_class] &= ~(std::uint64_t{1} << node.bucket);
  } else if (node.place == Place::kInner) {
    inner_.unlink(nodes_, slot);
  }
}

}  // namespace kv_offload
