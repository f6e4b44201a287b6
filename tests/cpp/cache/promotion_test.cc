// SPDX-License-Identifier: Apache-2.0
// Promotion between two tiers: which chunks fetched from one tier are written to the other.
#include "cache/cache_fixture.h"

namespace kv_offload {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class PromotionTest : public CacheTest {
 protected:
  void make_with(TierSlotOptions faster, TierSlotOptions slower = {}, std::uint64_t rows = 1) {
    make({.rows = rows, .cache = {.tiers = {faster, slower}}, .slower = &slower_});
  }
  static Names queued(const FakeTier& tier) {
    Names result;
    for (const TierOp& op : tier.writes()) result.push_back(names({op.key}).front());
    return result;
  }
  void finish_all() {
    fake().finish();
    slower_->finish();
    step();
  }
  // Puts a chunk on the slower tier only, not in host memory.
  void keep_on_the_slower(const std::string& name) {
    store({name});
    finish_all();
    fake().remove(key_of(name), TierRemoval::Reason::kEvicted);
    push_out();
    ASSERT_TRUE(slower_->holds(key_of(name)));
    ASSERT_FALSE(fake().holds(key_of(name)));
  }
  // Fills host memory with other chunks.
  void push_out() {
    store({"other" + std::to_string(++others_)});
    finish_all();
  }
  // Loads the chunk and checks its bytes.
  void fetch(const std::string& name) {
    const RequestHandle request = begin();
    ASSERT_EQ(scan(request, {name}), "P");
    step();
    fake().finish();
    slower_->finish(1);
    step();
    ASSERT_EQ(scan(request, {name}), "H");
    load(request, {name});
    end(request);
  }

  FakeTier* slower_ = nullptr;
  int others_ = 0;
};

TEST_F(PromotionTest, a_chunk_fetched_from_the_slower_tier_is_written_to_the_faster_one) {
  make_with({});
  keep_on_the_slower("a");
  fetch("a");
  EXPECT_THAT(queued(fake()), ElementsAre("a"));
  EXPECT_THAT(queued(*slower_), IsEmpty());
  finish_all();
  EXPECT_TRUE(fake().holds(key_of("a")));
  EXPECT_EQ(world().hit_tokens("slow"), World::kTokens);
  push_out();
  fetch("a");
  EXPECT_EQ(world().hit_tokens("fs"), World::kTokens) << "the faster tier now has the same bytes";
}

TEST_F(PromotionTest, a_request_may_exclude_one_tier_of_two) {
  constexpr std::uint8_t kFaster = 1, kSlower = 2;
  make_with({}, {}, 2);
  keep_on_the_slower("a");
  push_out();
  const RequestHandle limited = begin({.load_tiers = kFaster});
  EXPECT_EQ(scan(limited, {"a"}), "M");
  end(limited);
  EXPECT_EQ(world().miss_tokens("disabled"), World::kTokens);
  const RequestHandle request = begin({.load_from_cpu = false, .load_tiers = kSlower});
  EXPECT_EQ(scan(request, {"a"}), "P");
  step();
  EXPECT_EQ(scan(begin({.load_tiers = kFaster}), {"a"}), "M")
      << "the chunk is being read from the other tier";
  slower_->finish(1);
  step();
  EXPECT_EQ(scan(request, {"a"}), "H");
  EXPECT_EQ(scan(begin({.load_from_cpu = false, .load_tiers = kFaster}), {"a"}), "M")
      << "only the other tier has the chunk";
  EXPECT_EQ(scan(begin({.load_tiers = kFaster}), {"a"}), "H") << "host memory has the chunk";
}

// While it is being read from a tier that the request may not load from.
TEST_F(PromotionTest, a_lookup_of_a_chunk_that_is_being_read_belongs_to_the_tenant_of_the_request) {
  make({.rows = 2,
        .cache = {.tiers = {{}, {}}, .tenants = {{"other", 0}, {"quiet", 0.75}, {"flood", 0.25}}},
        .slower = &slower_});
  keep_on_the_slower("a");
  push_out();
  const RequestHandle flood = begin({.load_from_cpu = false, .load_tiers = 2, .tenant = 2});
  EXPECT_EQ(scan(flood, {"a"}), "P");
  step();
  ASSERT_EQ(slower_->reads().size(), 1u);
  fake().knows = false;
  EXPECT_EQ(scan(begin({.load_tiers = 1, .tenant = 1}), {"a"}), "M");
  step();
  using Asked = std::vector<std::pair<std::vector<ChunkKey>, LookupOptions>>;
  EXPECT_EQ(fake().asked, (Asked{{{key_of("a")}, {KeyOrder::kNone, 1, 0.75}}}));
}

TEST_F(PromotionTest, a_chunk_fetched_from_the_faster_tier_is_not_written_to_the_slower_one) {
  make_with({});
  store({"a"});
  finish_all();
  slower_->remove(key_of("a"), TierRemoval::Reason::kEvicted);
  push_out();
  fetch("a");
  EXPECT_THAT(queued(*slower_), IsEmpty());
}

TEST_F(PromotionTest, a_read_only_tier_is_never_written) {
  make_with({.write_policy = WritePolicy::kReadOnly}, {}, 2);
  store({"a"});
  finish_all();
  EXPECT_FALSE(fake().holds(key_of("a")));
  fake().records[key_of("b")] = slower_->records.at(key_of("a"));
  push_out();
  push_out();
  fetch("a");
  for (int i = 0; i < 3; ++i) push_out();
  EXPECT_TRUE(fake().records.contains(key_of("b")));
  EXPECT_EQ(fake().records.size(), 1u) << "neither stored nor fetched nor evicted chunks were written";
  EXPECT_EQ(peek({"b"}), "P") << "the record is read";
}

TEST_F(PromotionTest, reuse_counts_the_uses_of_a_fetched_chunk) {
  make_with({.write_policy = WritePolicy::kReuse, .reuse_threshold = 3});
  keep_on_the_slower("a");  // the first use
  fetch("a");               // the second use
  EXPECT_THAT(queued(fake()), IsEmpty());
  push_out();
  fetch("a");
  EXPECT_THAT(queued(fake()), ElementsAre("a"));
}

TEST_F(PromotionTest, on_evict_writes_a_chunk_when_host_memory_evicts_it) {
  make_with({.write_policy = WritePolicy::kOnEvict}, {}, 8);
  store({"a"});
  finish_all();
  world().tier->records.clear();
  for (int i = 0; i < 16; ++i) push_out();
  fake().remove(key_of("a"), TierRemoval::Reason::kEvicted);
  fetch("a");
  EXPECT_FALSE(fake().holds(key_of("a")));
  for (int i = 0; i < 16; ++i) push_out();
  EXPECT_TRUE(fake().holds(key_of("a")));
}

TEST_F(PromotionTest, a_failed_read_promotes_nothing) {
  make_with({});
  keep_on_the_slower("a");
  slower_->damage(key_of("a"));
  const RequestHandle request = begin();
  ASSERT_EQ(scan(request, {"a"}), "P");
  step();
  slower_->finish();
  step();
  EXPECT_EQ(scan(request, {"a"}), "M");
  end(request);
  EXPECT_THAT(queued(fake()), IsEmpty());
  EXPECT_FALSE(fake().holds(key_of("a")));
}

}  // namespace
}  // namespace kv_offload
