// SPDX-License-Identifier: Apache-2.0
// PrefixTree: which known entry directly follows which in a prefix. Entries arrive and leave in any order: an
// unknown parent is a placeholder as long as it has children. Every call is O(1).
//
// Invariants: a node is taken (has a slot) or has children; only taken nodes that are not hidden count as
// their parent's children. Memory: 24 bytes per node, plus 16 to 32 in the table.
#pragma once

#include "base/segmented_vector.h"
#include "policy/eviction_policy.h"
#include "policy/id_table.h"

namespace kv_offload {

class PrefixTree {
 public:
  using Node = std::uint32_t;
  static constexpr Node kNone = IdTable::kNone;

  // Returns the entry's node, or kNone if it has no id (0) or another entry has the same id. If it throws,
  // nothing has changed.
  Node take(ChunkId id, ChunkId parent, Slot slot);
  // Sets a taken node's parent later. Changes nothing if the parent is known.
  void set_parent(Node node, ChunkId parent);
  // REQUIRES: taken. Do not use the node afterwards.
  void leave(Node node);
  // hide() stops counting the node among its parent's children, show() counts it again. REQUIRES: taken; the
  // node and its parent must not change in between.
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
  // True if it has a child now, or had one since it was taken.
  bool extended(Node node) const { return nodes_[node].child_tag != 0; }
  // True if it has, or had since it was taken, more than one child: the head of several prefixes.
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
    std::uint32_t child_tag = 0;  // of its only child so far
  };

  auto id_of() const {
    return [this](Node node) { return nodes_[node].id; };
  }
  Node find_or_make(ChunkId id);
  void on_child(Node parent, ChunkId child);
  void remove(Node node);

  SegmentedVector<Data> nodes_;
  Node first_free_ = kNone;  // linked by `parent`
  IdTable by_id_;
};

}  // namespace kv_offload
