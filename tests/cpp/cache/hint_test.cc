// SPDX-License-Identifier: Apache-2.0
// The hints that eviction policies get about chunks and requests: parents and priorities.
#include "cache/cache_fixture.h"

namespace kv_offload {
namespace {

class HintTest : public OverBoth<CacheTest> {
 protected:
  // Returns the hint in the write op of a chunk.
  EntryInfo told(const std::string& name) {
    for (const TierOp& op : tier().writes()) {
      if (op.key == key_of(name)) return op.entry_info;
    }
    ADD_FAILURE() << name << " is not being written";
    return {};
  }
  Names store_deep(RequestHandle request, const Names& offered, std::uint32_t first_depth) {
    const auto all = keys(offered);
    std::vector<std::uint32_t> depths;
    for (std::uint32_t i = 0; i < all.size(); ++i) depths.push_back(first_depth + i);
    const StoreGrant grant = cache().prepare_store(request, all, depths);
    Job job{{}, grant.transfer};
    for (const std::uint32_t i : grant.accepted) job.keys.push_back(all[i]);
    copy(job);
    complete(job);
    return names(job.keys);
  }
  static ChunkId id(const std::string& name) { return chunk_id(key_of(name)); }
};

KV_OFFLOAD_OVER_BOTH(HintTest);

TEST_P(HintTest, the_parent_of_a_chunk_is_the_previously_offered_chunk) {
  const RequestHandle request = begin();
  store_deep(request, {"a", "b"}, 16);
  store_deep(request, {"c"}, 18);  // in a later step
  EXPECT_EQ(told("a").parent, 0u);
  EXPECT_EQ(told("b").parent, id("a"));
  EXPECT_EQ(told("c").parent, id("b"));
  store_deep(request, {"x"}, 16);  // the head of another prompt
  EXPECT_EQ(told("x").parent, 0u);
}

TEST_P(HintTest, without_depths_the_parent_is_the_previous_key_of_the_call) {
  store({"a", "b"});
  EXPECT_EQ(told("b").parent, id("a"));
}

TEST_P(HintTest, a_chunk_after_a_loaded_prefix_has_its_last_chunk_as_parent) {
  store({"a", "b"});
  const RequestHandle request = begin();
  EXPECT_EQ(scan(request, {"a", "b"}), "HH");
  load(request, {"a", "b"});
  store_deep(request, {"c"}, 3);
  EXPECT_EQ(told("c").parent, id("b"));
}

TEST_P(HintTest, a_fetched_chunk_has_the_previous_chunk_as_parent) {
  record({"a", "b"});
  const RequestHandle request = begin();
  EXPECT_EQ(scan(request, {"a", "b"}), "PP");
  step();
  ASSERT_EQ(tier().reads().size(), 2u);
  EXPECT_EQ(tier().reads()[0].entry_info.parent, 0u);
  EXPECT_EQ(tier().reads()[1].entry_info.parent, id("a"));
  EXPECT_NE(tier().reads()[1].entry_info.request, 0u);
}

TEST_P(HintTest, low_priority_prompts_are_evicted_first_and_high_priority_last) {
  WorldOptions options;
  options.rows = 6;
  options.tier = false;
  make(options);
  const RequestHandle high = begin({.priority = 7});
  store(high, {"h1", "h2"});
  end(high);
  store({"n1", "n2"});
  const RequestHandle low = begin({.priority = -1});
  store(low, {"l1", "l2"});
  end(low);
  store({"x1", "x2"});
  EXPECT_EQ(peek({"l1"}), "M");
  EXPECT_EQ(peek({"h1", "h2"}) + peek({"n1", "n2"}), "HHHH");
  store({"y1", "y2"});
  EXPECT_EQ(peek({"n1"}), "M");
  EXPECT_EQ(peek({"h1", "h2"}), "HH");
}

TEST_P(HintTest, a_chunk_hit_by_a_request_of_high_priority_stays_longer) {
  WorldOptions options;
  options.rows = 4;
  options.tier = false;
  make(options);
  store({"a"});
  store({"b"});
  const RequestHandle request = begin({.priority = 1});
  EXPECT_EQ(scan(request, {"a"}), "H");
  load(request, {"a"});
  end(request);
  store({"c", "d", "e"});
  EXPECT_EQ(peek({"a"}) + peek({"b"}), "HM");
}

}  // namespace
}  // namespace kv_offload
