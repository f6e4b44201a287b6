// S3-FIFO (Yang et al., SOSP 2023): three queues. What is new waits in a small
// one, a tenth of all, and leaves from there unless it was hit; then it moves to
// the main one, a clock with up to three lives. What left the small queue unhit
// is remembered, and goes into the main one when it comes back.
//
// victim() sets pinned slots that it meets aside, once per pin; unpinned, they
// come back at the cold end of their queue. At most kMaxSteps slots are looked at
// per call, so that no call is long when everything was hit.
#pragma once

#include <array>
#include <vector>

#include "base/segmented_vector.h"
#include "policy/eviction_policy.h"
#include "policy/ghost_list.h"
#include "policy/recency_list.h"

namespace kv_offload {

class S3FifoPolicy final : public EvictionPolicy {
 public:
  void insert(Slot slot, const EntryInfo& info) override;
  void access(Slot slot, const EntryInfo& info) override;
  void erase(Slot slot) override;
  void pin(Slot slot) override;
  void unpin(Slot slot) override;
  std::optional<Slot> victim() override;
  std::string_view name() const override { return "s3fifo"; }

 private:
  static constexpr Slot kNone = RecencyList::kNone;
  static constexpr std::uint8_t kMaxHits = 3;
  static constexpr int kMaxSteps = 256;
  enum Queue : std::uint8_t { kSmall, kMain };
  enum class Place : std::uint8_t { kUnknown, kQueued, kParked /* pinned */ };
  struct Node {
    ChunkId id = 0;
    std::uint32_t request = 0;  // of the last hit: one request is one hit
    Slot newer = kNone;
    Slot older = kNone;
    Queue queue = kSmall;
    Place place = Place::kUnknown;
    std::uint8_t hits = 0;
    bool pinned = false;
  };
  struct Members {
    RecencyList list;
    std::size_t known = 0;  // parked ones too
  };

  RecencyList& list_of(Slot slot) { return queues_[nodes_[slot].queue].list; }
  // Parks what is pinned at the cold end; the coldest of the rest, or kNone.
  Slot coldest(Queue queue);
  void move_to_main(Slot slot);

  SegmentedVector<Node> nodes_;
  std::array<Members, 2> queues_;
  GhostList ghosts_;
};

}  // namespace kv_offload
