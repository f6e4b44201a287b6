#include "policy/s3fifo.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <random>

namespace kv_offload {
namespace {

// The algorithm in the plainest words: deques, the oldest in front.
class PlainS3Fifo {
 public:
  void insert(Slot slot, ChunkId id) {
    (ghosts_.contains(id) ? main_ : small_).push_back(slot);
    entries_[slot] = {id, 0};
  }
  void access(Slot slot) { entries_[slot].hits = std::min(3, entries_[slot].hits + 1); }
  Slot victim() {
    for (;;) {
      const bool small = main_.empty() || (!small_.empty() && small_.size() * 10 > entries_.size());
      std::deque<Slot>& queue = small ? small_ : main_;
      const Slot slot = queue.front();
      if (entries_[slot].hits == 0) return slot;
      queue.pop_front();
      main_.push_back(slot);
      entries_[slot].hits = small ? 0 : entries_[slot].hits - 1;
    }
  }
  void erase(Slot slot) {
    if (const auto at = std::find(small_.begin(), small_.end(), slot); at != small_.end()) {
      small_.erase(at);
      ghosts_.add(entries_[slot].id, entries_.size());
    } else {
      main_.erase(std::find(main_.begin(), main_.end(), slot));
    }
    entries_.erase(slot);
  }
  bool knows(Slot slot) const { return entries_.contains(slot); }
  std::size_t size() const { return entries_.size(); }

 private:
  struct Entry {
    ChunkId id;
    int hits;
  };
  std::map<Slot, Entry> entries_;
  std::deque<Slot> small_, main_;
  GhostList ghosts_;
};

TEST(S3FifoPolicy, DoesWhatThePlainAlgorithmDoes) {
  std::mt19937 random(3);
  constexpr std::size_t kCapacity = 40;
  S3FifoPolicy policy;
  PlainS3Fifo plain;
  std::uint32_t request = 0;
  for (int i = 0; i < 20000; ++i) {
    // Slot and id go together, so that what left comes back.
    const Slot slot = random() % 3 == 0 ? random() % 20 : random() % 400;
    const ChunkId id = (slot + 1) * 0x9E3779B97F4A7C15ull;
    if (plain.knows(slot)) {
      policy.access(slot, {.id = id, .request = ++request});
      plain.access(slot);
      continue;
    }
    if (plain.size() == kCapacity) {
      const auto victim = policy.victim();
      ASSERT_EQ(victim, plain.victim()) << "call " << i;
      policy.erase(*victim);
      plain.erase(*victim);
    }
    policy.insert(slot, {.id = id, .request = ++request});
    plain.insert(slot, id);
  }
}

TEST(S3FifoPolicy, OneRequestIsOneHit) {
  S3FifoPolicy policy;
  policy.insert(0, {.id = 1, .request = 7});
  policy.insert(1, {.id = 2, .request = 8});
  policy.access(0, {.id = 1, .request = 7});  // its own: no hit
  EXPECT_EQ(policy.victim(), 0u);
  policy.access(0, {.id = 1, .request = 9});
  EXPECT_EQ(policy.victim(), 1u);
}

TEST(S3FifoPolicy, AnUnpinnedSlotIsAtTheColdEndOfItsQueue) {
  S3FifoPolicy policy;
  for (const Slot slot : {0u, 1u, 2u}) policy.insert(slot, {.id = slot + 1u});
  policy.pin(0);
  policy.pin(1);
  EXPECT_EQ(policy.victim(), 2u);
  policy.unpin(1);
  policy.unpin(0);
  EXPECT_EQ(policy.victim(), 0u);
}

TEST(S3FifoPolicy, NoCallLooksAtAllThatWasHit) {
  constexpr Slot kMany = 100000;
  S3FifoPolicy policy;
  for (Slot slot = 0; slot < kMany; ++slot) {
    policy.insert(slot, {.id = slot + 1u});
    for (std::uint32_t request = 1; request <= 3; ++request) policy.access(slot, {.request = request});
  }
  EXPECT_TRUE(policy.victim().has_value());  // a bound of steps, not of time: it ends at 256
}

}  // namespace
}  // namespace kv_offload
