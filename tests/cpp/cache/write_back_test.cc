// SPDX-License-Identifier: Apache-2.0
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
    parts_->write_back.on_stored({&slot, 1});
    return slot;
  }

  std::unique_ptr<SupplyParts> parts_;
};

TEST_F(WriteBackTest, write_through_writes_stored_chunks) {
  make(WritePolicy::kWriteThrough);
  const Slot slot = stored("a");
  EXPECT_EQ(writes(), 1u);
  parts().write_back.on_used(slot);
  EXPECT_FALSE(parts().write_back.write_before_eviction(slot));
  EXPECT_EQ(writes(), 1u);
}

// A chunk in use in host memory must not look old on the tier.
TEST_F(WriteBackTest, uses_in_host_memory_are_reported_to_the_tier_at_the_end_of_the_step) {
  make(WritePolicy::kWriteThrough);
  const Slot a = stored("a"), b = stored("b");
  parts().chunks.access(b, 7, 0);
  parts().chunks.set_return(b, 1e6);
  ASSERT_NE(parts().chunks.entry_info(b).returns_at, 0);
  parts().write_back.on_used(b);
  parts().chunks.access(a, 7, 0);
  parts().write_back.on_used(a);
  EXPECT_TRUE(parts().tier->told_used.empty());
  parts().write_back.publish_uses();
  const std::vector<TierUse>& told = parts().tier->told_used;
  ASSERT_EQ(told.size(), 2u) << "a store does not count as a use: its write sets the time";
  EXPECT_EQ(told[0].key, key_of("b"));
  EXPECT_EQ(told[0].entry_info.returns_at, 0) << "another host's clock has another zero";
  EXPECT_EQ(told[1].key, key_of("a"));
  EXPECT_EQ(told[1].entry_info.request, 7u);
  parts().write_back.publish_uses();
  EXPECT_EQ(told.size(), 2u) << "the use is reported twice";
}

// The tier may evict the record: it is written again when host memory evicts the chunk.
TEST_F(WriteBackTest, on_evict_uses_in_host_memory_are_not_reported) {
  make(WritePolicy::kOnEvict);
  parts().write_back.on_used(stored("a"));
  parts().write_back.publish_uses();
  EXPECT_TRUE(parts().tier->told_used.empty());
}

// Applies to policies that do not write a chunk when it is stored.
TEST_F(WriteBackTest, a_stored_chunk_with_a_record_is_marked_as_recorded) {
  for (const WritePolicy policy : {WritePolicy::kOnEvict, WritePolicy::kReuse, WritePolicy::kReadOnly}) {
    make(policy, 5);
    parts().record("a");
    EXPECT_TRUE(parts().chunks.at(stored("a")).recorded);
    EXPECT_FALSE(parts().chunks.at(stored("b")).recorded);
    EXPECT_EQ(writes(), 0u);
  }
}

TEST_F(WriteBackTest, only_write_through_writes_may_be_declined) {
  make(WritePolicy::kWriteThrough);
  stored("a");
  EXPECT_TRUE(parts().tier->writes().back().may_decline);
  make(WritePolicy::kOnEvict);
  EXPECT_TRUE(parts().write_back.write_before_eviction(stored("a")));
  EXPECT_FALSE(parts().tier->writes().back().may_decline) << "the last chance to write the chunk";
}

TEST_F(WriteBackTest, a_declined_write_is_counted_but_not_as_a_failure) {
  make(WritePolicy::kWriteThrough);
  parts().tier->fail(StatusKind::kDeclined);
  stored("a");
  parts().finish();
  EXPECT_EQ(parts().metrics.value("kv_offload_dropped_bytes_total", {"fs", "declined"}), kPageBytes);
  EXPECT_EQ(parts().metrics.value("kv_offload_failures_total", {"fs", "write", "declined"}), 0);
  EXPECT_EQ(parts().chunks.pinned(), 0u);
}

TEST_F(WriteBackTest, reuse_writes_at_the_threshold) {
  make(WritePolicy::kReuse, 3);
  const Slot slot = stored("a");
  parts().write_back.on_used(slot);
  EXPECT_EQ(writes(), 0u);
  parts().write_back.on_used(slot);
  EXPECT_EQ(writes(), 1u);
}

TEST_F(WriteBackTest, on_evict_writes_before_a_chunk_is_evicted) {
  make(WritePolicy::kOnEvict);
  const Slot slot = stored("a");
  EXPECT_EQ(writes(), 0u);
  EXPECT_TRUE(parts().write_back.write_before_eviction(slot));
  EXPECT_EQ(writes(), 1u);
  parts().finish();
  EXPECT_FALSE(parts().write_back.write_before_eviction(slot)) << "the chunk is recorded";
}

TEST_F(WriteBackTest, a_failed_write_is_not_repeated_before_the_eviction) {
  make(WritePolicy::kOnEvict);
  const Slot slot = stored("a");
  parts().tier->fail(StatusKind::kIo);
  EXPECT_TRUE(parts().write_back.write_before_eviction(slot));
  parts().finish();
  EXPECT_FALSE(parts().write_back.write_before_eviction(slot));
}

TEST_F(WriteBackTest, a_chunk_lost_to_an_unwritable_tier_is_counted) {
  make(WritePolicy::kOnEvict);
  const Slot slot = stored("a");
  parts().tier->switch_off();
  parts().ops.poll();
  EXPECT_FALSE(parts().write_back.write_before_eviction(slot));
  EXPECT_EQ(parts().metrics.value("kv_offload_dropped_bytes_total", {"fs", "pressure"}), kPageBytes);
}

TEST_F(WriteBackTest, a_queue_of_one_tenant_does_not_keep_others_from_writing_before_an_eviction) {
  PartsOptions options;
  options.rows = 512;
  options.cache.tiers = {{.write_policy = WritePolicy::kOnEvict}};
  options.cache.tenants = {{"other", 0}, {"quiet", 0.5}, {"flood", 0.5}};
  parts_ = std::make_unique<SupplyParts>(std::move(options));
  int last = 0;
  // Returns how many of 70 chunks of the tenant are written before they are evicted.
  const auto written = [&](TenantId tenant) {
    int count = 0;
    for (int i = 0; i < 70; ++i) {
      EntryInfo entry_info;
      entry_info.tenant = tenant;
      const Slot slot = parts().chunks.insert_filling(key_of(fmt::format("{}", ++last)), 0, parts().take(0),
                                                      entry_info, kNoTicket);
      parts().chunks.finish_store(slot);
      const bool is_lost = parts().write_back.is_lost_by_eviction(slot);
      const bool is_written = parts().write_back.write_before_eviction(slot);
      EXPECT_NE(is_lost, is_written);
      count += is_written;
    }
    return count;
  };
  EXPECT_EQ(written(2), 64);
  EXPECT_EQ(written(1), 32) << "its half";
  EXPECT_EQ(written(0), 1) << "it has no share";
  parts().finish();
  EXPECT_EQ(written(2), 64);
  EXPECT_EQ(written(1), 32) << "its earlier writes have ended";
}

TEST_F(WriteBackTest, next_victims_are_written_only_when_rows_are_short) {
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
