// SPDX-License-Identifier: Apache-2.0
// vLLM drops its jobs and resets its own cache; our cache is kept (TieredCache::abandon_jobs).
#include "cache/cache_fixture.h"

namespace kv_offload {
namespace {

using ::testing::IsEmpty;

class AbandonJobsTest : public OverBoth<CacheTest> {
 protected:
  void make_with_rows(std::uint64_t rows) {
    WorldOptions options;
    options.rows = rows;
    make(options);
  }
};
KV_OFFLOAD_OVER_BOTH(AbandonJobsTest);

TEST_P(AbandonJobsTest, chunks_in_memory_and_their_writes_are_kept) {
  store({"a"});
  tier().finish();
  step();
  store({"b"});  // its write is queued
  cache().abandon_jobs();
  EXPECT_EQ(peek({"a", "b"}), "HH");
  tier().finish();
  step();
  world().restart();
  EXPECT_EQ(peek({"a", "b"}), "PP");
}

TEST_P(AbandonJobsTest, a_store_in_flight_is_discarded_and_its_row_waits_for_the_ranks) {
  make_with_rows(2);
  const Job storing = offer(begin(), {"a"});
  cache().abandon_jobs();
  EXPECT_EQ(peek({"a"}), "M");
  EXPECT_EQ(cache().stats().quarantined_rows, 1u);
  EXPECT_EQ(offer(begin(), {"b", "c"}).keys.size(), 1u);
  copy(storing);
  complete(storing);  // a late completion has no effect
  step();
  EXPECT_EQ(peek({"a"}), "M");
  EXPECT_EQ(cache().stats().quarantined_rows, 0u);
  EXPECT_EQ(store({"c"}), Names{"c"});
}

TEST_P(AbandonJobsTest, a_load_in_flight_keeps_its_row_until_the_ranks_have_reported) {
  make_with_rows(1);
  store({"a"});
  tier().finish();
  step();
  const RequestHandle reader = begin();
  scan(reader, {"a"});
  const Job loading = begin_load(reader, {"a"});
  cache().abandon_jobs();
  end(reader);
  EXPECT_EQ(peek({"a"}), "H");
  EXPECT_THAT(store({"b"}), IsEmpty());
  EXPECT_TRUE(world().holds(loading.keys[0], loading.transfer.rows[0], 0));
  world().report(loading.transfer.ticket);
  step();
  EXPECT_EQ(cache().stats().pinned_chunks, 0u);
  EXPECT_EQ(store({"b"}), Names{"b"});
}

TEST_P(AbandonJobsTest, a_completed_load_is_released_once) {
  store({"a"});
  tier().finish();
  step();
  const RequestHandle reader = begin();
  scan(reader, {"a"});
  load(reader, {"a"});
  cache().abandon_jobs();
  EXPECT_EQ(cache().stats().pinned_chunks, 0u);
  EXPECT_EQ(peek({"a"}), "H");
}

}  // namespace
}  // namespace kv_offload
