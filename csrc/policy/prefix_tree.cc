#include "policy/prefix_tree.h"

#include <cassert>

namespace kv_offload {

PrefixTree::Node PrefixTree::take(ChunkId id, ChunkId parent, Slot slot) {
  if (id == 0) return kNone;
  const Node node = find_or_make(id);
  if (nodes_[node].slot != kNone) return kNone;
  nodes_[node].slot = slot;
  if (parent == 0 || parent == id) return node;
  const Node above = find_or_make(parent);
  nodes_[node].parent = above;
  note_child(above, id);
  return node;
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

void PrefixTree::note_child(Node parent, ChunkId child) {
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

std::size_t PrefixTree::locate(ChunkId id) const {
  std::size_t at = home(id);
  while (cells_[at] != kNone && nodes_[cells_[at]].id != id) at = (at + 1) & (cells_.size() - 1);
  return at;
}

PrefixTree::Node PrefixTree::find_or_make(ChunkId id) {
  if (2 * (used_ + 1) > cells_.size()) grow();
  const std::size_t at = locate(id);
  if (cells_[at] != kNone) return cells_[at];
  if (free_.empty()) {
    free_.push_back(static_cast<Node>(nodes_.size()));
    nodes_.emplace_back();
  }
  const Node node = free_.back();
  free_.pop_back();
  nodes_[node] = Data{};
  nodes_[node].id = id;
  cells_[at] = node;
  ++used_;
  return node;
}

// Moves later cells of the run back over the hole: no tombstones.
void PrefixTree::remove(Node node) {
  const std::size_t mask = cells_.size() - 1;
  std::size_t hole = locate(nodes_[node].id);
  for (std::size_t at = (hole + 1) & mask; cells_[at] != kNone; at = (at + 1) & mask) {
    if (((at - home(nodes_[cells_[at]].id)) & mask) >= ((at - hole) & mask)) {
      cells_[hole] = cells_[at];
      hole = at;
    }
  }
  cells_[hole] = kNone;
  free_.push_back(node);
  --used_;
}

void PrefixTree::grow() {
  const std::vector<Node> old = std::move(cells_);
  cells_.assign(2 * old.size(), kNone);
  for (const Node node : old) {
    if (node != kNone) cells_[locate(nodes_[node].id)] = node;
  }
}

}  // namespace kv_offload
