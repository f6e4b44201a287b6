#include "cache/write_back.h"

#include "cache/parts.h"

namespace kv_offload {
namespace {

class WriteBackTest : public ::testing::Test {
 protected:
  void make(WritePolicy policy, std::uint32_t reuse_threshold = 2) {
    PartsOptions options;
    options.cache.tiers = {{.write_policy = policy, .reuse_threshold = reuse_threshold}};
    parts_ = std::make_unique<SupplyParts>(std::move(options));
  }
  SupplyParts& parts() { return *parts_; }
  std::size_t writes() { return parts_->tier->queued_writes(); }
  Slot stored(const std::string& name) {
    const Slot slot = parts_->resident(name);
    parts_->write_back.note_stored({&slot, 1});
    return slot;
  }

  std::unique_ptr<SupplyParts> parts_;
};

TEST_F(WriteBackTest, ThroughWritesWhatWasStored) {
  make(WritePolicy::kThrough);
  const Slot slot = stored("a");
  EXPECT_EQ(writes(), 1u);
  parts().write_back.note_used(slot);
  EXPECT_FALSE(parts().write_back.write_before_eviction(slot));
  EXPECT_EQ(writes(), 1u);
}

TEST_F(WriteBackTest, ReuseWritesAtTheThreshold) {
  make(WritePolicy::kReuse, 3);
  const Slot slot = stored("a");
  parts().write_back.note_used(slot);
  EXPECT_EQ(writes(), 0u);
  parts().write_back.note_used(slot);
  EXPECT_EQ(writes(), 1u);
}

TEST_F(WriteBackTest, OnEvictWritesBeforeAChunkGoes) {
  make(WritePolicy::kOnEvict);
  const Slot slot = stored("a");
  EXPECT_EQ(writes(), 0u);
  EXPECT_TRUE(parts().write_back.write_before_eviction(slot));
  EXPECT_EQ(writes(), 1u);
  parts().finish();
  EXPECT_FALSE(parts().write_back.write_before_eviction(slot)) << "it is recorded";
}

TEST_F(WriteBackTest, AWriteThatFailedIsNotRepeatedBeforeTheEviction) {
  make(WritePolicy::kOnEvict);
  const Slot slot = stored("a");
  parts().tier->fail(StatusKind::kIo);
  EXPECT_TRUE(parts().write_back.write_before_eviction(slot));
  parts().finish();
  EXPECT_FALSE(parts().write_back.write_before_eviction(slot));
}

TEST_F(WriteBackTest, ATierThatTakesNoWritesLosesTheChunkWhichIsCounted) {
  make(WritePolicy::kOnEvict);
  const Slot slot = stored("a");
  parts().tier->switch_off();
  parts().ops.poll();
  EXPECT_FALSE(parts().write_back.write_before_eviction(slot));
  EXPECT_EQ(parts().metrics.value("kv_offload_dropped_bytes_total", {"fs", "pressure"}), kPageBytes);
}

TEST_F(WriteBackTest, TheColdEndIsWrittenOnlyWhenRowsAreShortAndKeepsItsOrder) {
  make(WritePolicy::kOnEvict);
  const Slot a = stored("a");
  const Slot b = stored("b");
  parts().write_back.write_cold_end();
  EXPECT_EQ(writes(), 0u) << "half of the rows are free";
  stored("c");
  stored("d");
  parts().write_back.write_cold_end();
  EXPECT_EQ(writes(), 4u);
  parts().finish();
  EXPECT_EQ(parts().chunks.victim(), a);
  parts().chunks.discard(a);
  EXPECT_EQ(parts().chunks.victim(), b);
}

}  // namespace
}  // namespace kv_offload
