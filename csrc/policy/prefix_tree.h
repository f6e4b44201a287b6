// PrefixTree: which known entry lies right behind which in a prefix. Entries come
// and go in any order: a parent that is not here (yet) is a placeholder for as
// long as it has children. Every call is O(1).
//
// Invariants: a node is taken (has a slot) or has children; only taken nodes that are
// not hidden are counted as their parent's children. Memory: 24 bytes a node, 16 to 32
// of the table.
#pragma once

#include "base/segmented_vector.h"
#include "policy/eviction_policy.h"
#include "policy/id_table.h"

namespace kv_offload {

class PrefixTree {
 public:
  using Node = std::uint32_t;
  static constexpr Node kNone = IdTable::kNone;

  // The entry's node, or kNone when it has no id (0) or another entry has the same.
  Node take(ChunkId id, ChunkId parent, Slot slot);
  // What lies before a taken node, told after it was taken; nothing changes where that is known.
  void set_parent(Node node, ChunkId parent);
  // REQUIRES: taken. The node is not to be used any more.
  void leave(Node node);
  // Its parent does not count it among its children from now on; does again. REQUIRES: taken; nothing else is
  // done to either meanwhile.
  void hide(Node node) {
    if (nodes_[node].parent != kNone) --nodes_[nodes_[node].parent].children;
  }
  void show(Node node) {
    if (nodes_[node].parent != kNone) ++nodes_[nodes_[node].parent].children;
  }

  // kNone: a placeholder.
  Slot slot(Node node) const { return nodes_[node].slot; }
  Node parent(Node node) const { return nodes_[node].parent; }
  std::uint32_t children(Node node) const { return nodes_[node].children; }
  // Has (or had, while it is here) a child.
  bool extended(Node node) const { return nodes_[node].child_tag != 0; }
  // Has (or had, while it is here) more than one child: the head of several prefixes.
  bool branched(Node node) const { return nodes_[node].child_tag == kSeveral; }
  void prefetch(ChunkId id) const { by_id_.prefetch(id); }
  std::size_t size() const { return by_id_.size(); }

 private:
  static constexpr std::uint32_t kSeveral = 0xFFFFFFFFu;
  struct Data {
    ChunkId id = 0;
    Node parent = kNone;
    Slot slot = kNone;
    std::uint32_t children = 0;
    std::uint32_t child_tag = 0;  // of the one child that it ever had
  };

  auto id_of() const {
    return [this](Node node) { return nodes_[node].id; };
  }
  Node find_or_make(ChunkId id);
  void note_child(Node parent, ChunkId child);
  void remove(Node node);

  SegmentedVector<Data> nodes_;
  Node first_free_ = kNone;  // linked by `parent`
  IdTable by_id_;
};

}  // namespace kv_offload
