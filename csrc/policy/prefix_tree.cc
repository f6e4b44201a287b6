// SPDX-License-Identifier: Apache-2.0
#include "policy/prefix_tree.h"

#include <cassert>

namespace kv_offload {

PrefixTree::Node PrefixTree::take(ChunkId id, ChunkId parent, Slot slot) {
  if (id == 0) return kNone;
  const Node node = find_or_make(id);
  if (nodes_[node].slot != kNone) return kNone;
  nodes_[node].slot = slot;
  try {
    set_parent(node, parent);
  } catch (...) {
    leave(node);
    throw;
  }
  return node;
}

void PrefixTree::set_parent(Node node, ChunkId parent) {
  if (parent == 0 || parent == nodes_[node].id || nodes_[node].parent != kNone) return;
  const Node above = find_or_make(parent);
  nodes_[node].parent = above;
  on_child(above, nodes_[node].id);
}

void PrefixTree::leave(Node node) {
  assert(nodes_[node].slot != kNone);
  const Node above = nodes_[node].parent;
  nodes_[node].slot = kNone;
  nodes_[node].parent = kNone;
  if (nodes_[node].children == 0) remove(node);
  if (above == kNone) return;
  if (--nodes_[above].children == 0 && nodes_[above].slot == kNone) remove(above);
}

void PrefixTree::on_child(Node parent, ChunkId child) {
  Data& data = nodes_[parent];
  ++data.children;
  std::uint32_t tag = static_cast<std::uint32_t>(child >> 24) | 1;
  if (tag == kSeveral) tag = 1;
  if (data.child_tag == 0) {
    data.child_tag = tag;
  } else if (data.child_tag != tag) {
    data.child_tag = kSeveral;
  }
}

PrefixTree::Node PrefixTree::find_or_make(ChunkId id) {
  return by_id_.find_or_add(id, id_of(), [&] {
    Node node = first_free_;
    if (node == kNone) {
      node = static_cast<Node>(nodes_.size());
      nodes_.push_back(Data{});
    } else {
      first_free_ = nodes_[node].parent;
      nodes_[node] = Data{};
    }
    nodes_[node].id = id;
    return node;
  });
}

void PrefixTree::remove(Node node) {
  by_id_.erase(nodes_[node].id, id_of());
  nodes_[node].parent = first_free_;
  first_free_ = node;
}

}  // namespace kv_offload
