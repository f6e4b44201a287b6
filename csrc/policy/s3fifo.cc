#include "policy/s3fifo.h"

#include <algorithm>
#include <cassert>

namespace kv_offload {

void S3FifoPolicy::insert(Slot slot, const EntryInfo& info) {
  nodes_.grow_to(std::size_t{slot} + 1);
  Node& node = nodes_[slot];
  assert(node.place == Place::kUnknown);
  node = Node{};
  node.id = info.id;
  node.request = info.request;
  node.queue = ghosts_.contains(info.id) ? kMain : kSmall;
  node.place = Place::kQueued;
  ++queues_[node.queue].known;
  list_of(slot).link_newest(nodes_, slot);
}

void S3FifoPolicy::access(Slot slot, const EntryInfo& info) {
  Node& node = nodes_[slot];
  assert(node.place != Place::kUnknown);
  if (info.request != 0 && node.request == info.request) return;
  node.request = info.request;
  node.hits = static_cast<std::uint8_t>(std::min<int>(node.hits + 1, kMaxHits));
}

void S3FifoPolicy::erase(Slot slot) {
  Node& node = nodes_[slot];
  assert(node.place != Place::kUnknown);
  if (node.place == Place::kQueued) list_of(slot).unlink(nodes_, slot);
  --queues_[node.queue].known;
  const std::size_t known = queues_[kSmall].known + queues_[kMain].known;
  if (node.queue == kSmall) ghosts_.add(node.id, known + 1);
  node = Node{};
}

void S3FifoPolicy::pin(Slot slot) {
  assert(nodes_[slot].place != Place::kUnknown && !nodes_[slot].pinned);
  nodes_[slot].pinned = true;
}

void S3FifoPolicy::unpin(Slot slot) {
  Node& node = nodes_[slot];
  assert(node.place != Place::kUnknown && node.pinned);
  node.pinned = false;
  if (node.place != Place::kParked) return;
  node.place = Place::kQueued;
  list_of(slot).link_oldest(nodes_, slot);
}

std::optional<Slot> S3FifoPolicy::victim() {
  const std::size_t known = queues_[kSmall].known + queues_[kMain].known;
  for (int step = 0;; ++step) {
    const bool small_first = queues_[kSmall].known * 10 > known;
    Slot slot = coldest(small_first ? kSmall : kMain);
    if (slot == kNone) slot = coldest(small_first ? kMain : kSmall);
    if (slot == kNone) return std::nullopt;
    Node& node = nodes_[slot];
    if (node.hits == 0 || step == kMaxSteps) return slot;
    if (node.queue == kSmall) {
      move_to_main(slot);
    } else {
      --node.hits;
      list_of(slot).unlink(nodes_, slot);
      list_of(slot).link_newest(nodes_, slot);
    }
  }
}

Slot S3FifoPolicy::coldest(Queue queue) {
  RecencyList& list = queues_[queue].list;
  while (list.oldest != kNone && nodes_[list.oldest].pinned) {
    nodes_[list.oldest].place = Place::kParked;
    list.unlink(nodes_, list.oldest);
  }
  return list.oldest;
}

void S3FifoPolicy::move_to_main(Slot slot) {
  queues_[kSmall].list.unlink(nodes_, slot);
  --queues_[kSmall].known;
  ++queues_[kMain].known;
  nodes_[slot].queue = kMain;
  nodes_[slot].hits = 0;
  queues_[kMain].list.link_newest(nodes_, slot);
}

}  // namespace kv_offload
