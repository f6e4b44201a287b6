// The policy of this project: `prefix`. It keeps what is most likely to come back
// soon, by what a KV cache knows and others do not:
//
// - A chunk without those before it is worth nothing: only the last known chunks
//   of prefixes (leaves) are victims. While an unpinned leaf is left, nothing goes
//   before a chunk that lies behind it.
// - What a request brought tells what becomes of it. Requests are classed by whether
//   they came back to something, and by how much new prompt they bring; chunks, by whether they were used
//   before and whether they end a prompt. How soon the chunks of each class come back, by age, is learned
//   while serving (ReturnHistory, ReturnModel). The leaf with the least worth goes, when that is clearly less
//   than what the least recent leaf is worth; else that one goes. So without anything learned it is LRU on
//   leaves, and it stays near LRU where there is nothing to be learned.
// - What a slower tier has too is worth half: when it comes back it is read, where the other would have to be
//   computed. So host memory comes to hold what a disk of little more than its size has dropped or declined.
//
// Leaves stand in one set for each class, recorded on a tier or not, and age, by recency. A leaf that grew
// older is moved when it comes up as a candidate, at most kMaxMoves in a call. O(log n). Memory: about 100
// bytes an entry, and at most 24 MB of samples.
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
#include "policy/return_history.h"
#include "policy/return_model.h"

namespace kv_offload {

class PrefixPolicy final : public EvictionPolicy {
 public:
  void insert(Slot slot, const EntryInfo& info) override;
  void access(Slot slot, const EntryInfo& info) override;
  void refresh(Slot slot, const EntryInfo& info) override;
  void prefetch(ChunkId id) const override {
    tree_.prefetch(id);
    history_.prefetch(id);
  }
  void set_recorded(Slot slot, bool recorded) override;
  void erase(Slot slot) override;
  void pin(Slot slot) override;
  void unpin(Slot slot) override;
  std::optional<Slot> victim() override;
  void set_aside(Slot slot) override;
  void put_back(Slot slot) override;
  std::string_view name() const override { return "prefix"; }

 private:
  static constexpr Slot kNone = RecencyList::kNone;
  static constexpr int kMaxMoves = 32;
  static constexpr unsigned kKinds = 2 * ReturnModel::kClasses;
  // Of what an entry that no tier has is worth. (benchmarks/two_tiers.py: with less, more hits are the
  // disk's.)
  static constexpr float kRecordedWorth = 0.5f;
  enum class Place : std::uint8_t {
    kUnknown,
    kLeaf,
    kInner,  // has children: in the list of what is taken only when no leaf is left
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
  // What victim() looks at of each set, without touching the set.
  struct Oldest {
    std::uint64_t use = 0;
    std::uint64_t due = 0;  // when it is too old for its set
  };

  void note_use(Node& node);
  Slot parent_of(const Node& node) const;
  // Used later, or by the same request.
  static bool is_as_recent(const Node& above, const Node& node) {
    return above.use > node.use || (node.record != 0 && above.record == node.record);
  }
  void no_leaf_above(const Node& node);  // its parent has a child now
  // By what it is now: leaf, inner or pinned. lift: out of where it is.
  void put(Slot slot);
  void lift(Slot slot);
  void put_leaf(Slot slot);
  void put_oldest_inner(Slot slot);
  void note_oldest(unsigned kind, unsigned bucket);
  bool settle_oldest(unsigned kind, unsigned bucket, int* moves);
  bool has_children(const Node& node) const {
    return node.tree != PrefixTree::kNone && tree_.children(node.tree) > 0;
  }
  bool is_branched(const Node& node) const {
    return node.tree != PrefixTree::kNone && tree_.branched(node.tree);
  }
  // (Of an entry that no request used here it is not known.)
  bool is_end(const Node& node) const {
    return node.record != 0 && node.tree != PrefixTree::kNone && !tree_.extended(node.tree);
  }
  // A class, and whether a tier has it too.
  unsigned kind_of(const Node& node) const {
    // Of the youngest the request may still go on behind it.
    const bool end = is_end(node) && now_ - node.time >= ReturnModel::edge(1);
    return ReturnModel::class_of(classes_.class_of(node.record), end, node.used) +
           (node.recorded ? ReturnModel::kClasses : 0);
  }
  float worth(unsigned kind, unsigned bucket) const {
    return kind < ReturnModel::kClasses ? model_.worth(kind, bucket)
                                        : kRecordedWorth * model_.worth(kind - ReturnModel::kClasses, bucket);
  }
  ReturnHistory::Use use_of(const Node& node) const {
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
  ReturnModel model_;
  ReturnHistory history_{model_, classes_};
  template <typename T>
  using Sets = std::array<std::array<T, ReturnModel::kBuckets>, kKinds>;
  Sets<Leaves> leaves_;
  Sets<Oldest> oldest_;                         // of those that are not empty
  std::array<std::uint64_t, kKinds> filled_{};  // bit b: leaves_[kind][b] is not empty
  RecencyList inner_;
};

}  // namespace kv_offload
