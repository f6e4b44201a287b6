// SPDX-License-Identifier: Apache-2.0
// This project's own policy: `prefix`. It keeps what is most likely to be reused soon, based on what only a
// KV cache knows:
//
// - A chunk is useless without the chunks before it, so only the last known chunks of prefixes (leaves) are
//   victims. While an unpinned leaf is left, no chunk is evicted before the chunks after it.
// - The request predicts the reuse of its chunks. Requests are classed by whether they reused earlier entries
//   and by how much new prompt they bring. Chunks are classed by whether they were used before and whether
//   they end a prompt. ReuseSampler and ReusePredictor learn while serving how soon the chunks of each class
//   are reused, by age. The leaf with the least worth is evicted if it is clearly worth less than the least
//   recent leaf; otherwise the least recent leaf is. So without any learned data the policy is LRU on leaves,
//   and it stays near LRU if there is nothing to learn.
// - A chunk that a slower tier has too is worth half: on reuse it is read instead of recomputed. So host
//   memory tends to keep what a disk of little more than its size has evicted or declined.
//
// Leaves are kept in one set per class, tier copy (yes or no) and age bucket, ordered by recency. A leaf that
// outgrew its bucket is moved when it becomes a candidate, at most kMaxMoves per call. O(log n). Memory:
// about 100 bytes per entry, and at most 24 MB of samples.
#pragma once

#include <array>
#include <set>
#include <utility>
#include <vector>

#include "base/segmented_vector.h"
#include "policy/eviction_policy.h"
#include "policy/prefix_tree.h"
#include "policy/recency_list.h"
#include "policy/request_classes.h"
#include "policy/reuse_predictor.h"
#include "policy/reuse_sampler.h"

namespace kv_offload {

class PrefixPolicy final : public EvictionPolicy {
 public:
  void insert(Slot slot, const EntryInfo& info) override;
  void access(Slot slot, const EntryInfo& info) override;
  void refresh(Slot slot, const EntryInfo& info) override;
  void identify(Slot slot, const EntryInfo& info) override;
  // Always inlined: GCC 12 removes a call of a function that only prefetches.
  [[gnu::always_inline]] void prefetch(ChunkId id) const override {
    tree_.prefetch(id);
    sampler_.prefetch(id);
  }
  void set_recorded(Slot slot, bool recorded) override;
  void erase(Slot slot) override;
  void pin(Slot slot) override;
  void unpin(Slot slot) override;
  std::optional<Slot> victim() override;
  void set_aside(Slot slot) override;
  void put_back(Slot slot) override;
  bool is_pinned(Slot slot) const { return nodes_[slot].place == Place::kPinned; }
  std::string_view name() const override { return "prefix"; }

 private:
  static constexpr Slot kNone = RecencyList::kNone;
  static constexpr int kMaxMoves = 32;
  static constexpr unsigned kKinds = 2 * ReusePredictor::kClasses;
  // Worth relative to an entry that no tier has. (benchmarks/two_tiers.py: with a smaller value, more hits
  // come from disk.)
  static constexpr float kRecordedWorth = 0.5f;
  enum class Place : std::uint8_t {
    kUnknown,
    kLeaf,
    kInner,  // has children: in the list that is evicted only when no leaf is left
    kPinned,
  };
  struct Node {
    std::uint64_t use = 0;   // number of its last use: the order of recency
    std::uint64_t time = 0;  // of its last use
    PrefixTree::Node tree = PrefixTree::kNone;
    RequestClasses::Record record = 0;
    Slot newer = kNone;  // kInner
    Slot older = kNone;
    Place place = Place::kUnknown;
    bool used = false;      // by a request other than the one that stored it
    bool recorded = false;  // a tier has it too
    std::uint8_t kind = 0;  // kLeaf: the set that it is in
    std::uint8_t bucket = 0;
  };
  using Leaves = std::set<std::pair<std::uint64_t, Slot>>;  // use, slot
  // What victim() checks of each set, without touching the set.
  struct Oldest {
    std::uint64_t use = 0;
    std::uint64_t due = 0;  // when it becomes too old for its set
  };

  void on_use(Node& node);
  void forget(Node& node);  // REQUIRES: it is in no set and no list
  Slot parent_of(const Node& node) const;
  // True if `above` was used later, or by the same request.
  static bool is_as_recent(const Node& above, const Node& node) {
    return above.use > node.use || (node.record != 0 && above.record == node.record);
  }
  void demote_parent(const Node& node);  // its parent has a child now
  // Files the slot by its current state: leaf, inner or pinned. unlink: removes it from its set or list.
  void put(Slot slot);
  void unlink(Slot slot);
  void put_leaf(Slot slot) { put_leaf(slot, make_leaf()); }
  // The same in two parts, so that an entry moves without an allocation: `leaf` is empty unless it is a leaf.
  Leaves::node_type take_out(Slot slot);
  void put(Slot slot, Leaves::node_type leaf);
  void put_leaf(Slot slot, Leaves::node_type leaf);
  static Leaves::node_type make_leaf();
  static Leaves::node_type try_make_leaf();  // empty if memory runs out
  // Replaces the node's use and request by those of `next`, and files it by them.
  void move_to(Slot slot, const Node& next);
  void put_oldest_inner(Slot slot);
  // Files the slot, as the oldest inner entry if memory for a leaf runs out.
  void put_or_oldest_inner(Slot slot, Leaves::node_type leaf);
  void cache_oldest(unsigned kind, unsigned bucket);
  bool settle_oldest(unsigned kind, unsigned bucket, int* moves);
  bool has_children(const Node& node) const {
    return node.tree != PrefixTree::kNone && tree_.children(node.tree) > 0;
  }
  bool is_branched(const Node& node) const {
    return node.tree != PrefixTree::kNone && tree_.branched(node.tree);
  }
  // False if it is unknown, too: no request used the entry here.
  bool is_end(const Node& node) const {
    return node.record != 0 && node.tree != PrefixTree::kNone && !tree_.extended(node.tree);
  }
  // The class, and whether a tier has the entry too.
  unsigned kind_of(const Node& node) const {
    // A request may still extend the youngest entries.
    const bool end = is_end(node) && now_ - node.time >= ReusePredictor::edge(1);
    return ReusePredictor::class_of(classes_.class_of(node.record), end, node.used) +
           (node.recorded ? ReusePredictor::kClasses : 0);
  }
  float worth(unsigned kind, unsigned bucket) const {
    return kind < ReusePredictor::kClasses
               ? predictor_.worth(kind, bucket)
               : kRecordedWorth * predictor_.worth(kind - ReusePredictor::kClasses, bucket);
  }
  ReuseSampler::Use use_of(const Node& node) const {
    return {.record = node.record,
            .now = now_,
            .end = is_end(node),
            .used = node.used,
            .branched = is_branched(node)};
  }

  SegmentedVector<Node> nodes_;
  std::size_t known_ = 0;
  std::uint64_t now_ = 0;   // entries stored so far
  std::uint64_t uses_ = 0;  // stored or hit
  PrefixTree tree_;
  RequestClasses classes_;
  ReusePredictor predictor_;
  ReuseSampler sampler_{predictor_, classes_};
  template <typename T>
  using Sets = std::array<std::array<T, ReusePredictor::kBuckets>, kKinds>;
  Sets<Leaves> leaves_;
  Sets<Oldest> oldest_;                         // valid for non-empty sets
  std::array<std::uint64_t, kKinds> filled_{};  // bit b: leaves_[kind][b] is not empty
  RecencyList inner_;
  Leaves aside_;  // leaves of entries that are set aside, unless their parents use them
};

}  // namespace kv_offload
