// SPDX-License-Identifier: Apache-2.0
#include "cache/device_loads.h"

#include "cache/parts.h"
#include "out_of_memory.h"

namespace kv_offload {
namespace {

using ::testing::ElementsAre;

class DeviceLoadsTest : public ::testing::Test {
 protected:
  void make(PartsOptions options) { parts_ = std::make_unique<LoadParts>(std::move(options)); }
  LoadParts& parts() {
    if (!parts_) make({});
    return *parts_;
  }
  DeviceLoads& jobs() { return parts().device_loads; }
  static std::vector<ChunkKey> keys(const Names& names) {
    std::vector<ChunkKey> result;
    for (const auto& name : names) result.push_back(key_of(name));
    return result;
  }
  DeviceLoads::Begun begin(const Names& names, const DeviceLoads::Load& load = {}) {
    return jobs().begin(keys(names), load);
  }

  std::unique_ptr<LoadParts> parts_;
};

TEST_F(DeviceLoadsTest, a_load_has_its_rows_until_it_is_completed_and_reported) {
  const Slot a = parts().resident("a");
  const auto load = begin({"a"});
  EXPECT_THAT(load.transfer.rows, ElementsAre(parts().chunks.at(a).row));
  jobs().complete(keys({"a"}));
  jobs().poll();
  EXPECT_EQ(parts().chunks.pinned(), 1u) << "a rank may still copy";
  parts().report(load.transfer.ticket);
  jobs().poll();
  EXPECT_EQ(parts().chunks.pinned(), 0u);
}

TEST_F(DeviceLoadsTest, a_load_of_ranks_on_two_hosts_has_its_rows_until_both_have_reported) {
  make({.spans_hosts = true});
  parts().resident("a");
  const Ticket ticket = begin({"a"}).transfer.ticket;
  jobs().complete(keys({"a"}));
  parts().report(ticket);
  parts().region->set_cut_off(true);
  jobs().poll();
  EXPECT_EQ(parts().chunks.pinned(), 1u) << "the rank on the lost host may still copy";
  parts().report_from_afar(ticket);
  jobs().poll();
  EXPECT_EQ(parts().chunks.pinned(), 0u);
}

TEST_F(DeviceLoadsTest, a_report_without_completion_does_not_end_a_load) {
  parts().resident("a");
  parts().report(begin({"a"}).transfer.ticket);
  jobs().poll();
  EXPECT_EQ(parts().chunks.pinned(), 1u);
  jobs().complete(keys({"a"}));
  EXPECT_EQ(parts().chunks.pinned(), 0u);
}

TEST_F(DeviceLoadsTest, loads_are_identified_by_all_their_keys_in_any_order) {
  parts().resident("a");
  parts().resident("b");
  const auto both = begin({"a", "b"});
  const auto one = begin({"a"});
  parts().report(both.transfer.ticket);
  parts().report(one.transfer.ticket);
  jobs().complete(keys({"b", "a"}));
  EXPECT_EQ(parts().chunks.pinned(), 1u);
  jobs().complete(keys({"b"}));
  EXPECT_EQ(parts().chunks.pinned(), 1u) << "no load has these keys";
  jobs().complete(keys({"a"}));
  EXPECT_EQ(parts().chunks.pinned(), 0u);
}

TEST_F(DeviceLoadsTest, a_load_that_is_refused_changes_nothing) {
  parts().resident("a");
  parts().fetching("b");
  EXPECT_THROW(begin({"a", "b"}), InvalidArgument);
  EXPECT_THROW(begin({"a", "absent"}), InvalidArgument);
  EXPECT_EQ(parts().chunks.pinned(), 1u) << "the pin of the fetch";
  EXPECT_EQ(begin({"a"}).hit_tokens[0], ChunkParts::kTokens);
}

TEST_F(DeviceLoadsTest, hits_count_for_the_tier_that_the_bytes_came_from) {
  parts().resident("a");
  parts().fetched("b");
  const auto first = begin({"a", "b"});
  EXPECT_EQ(first.hit_tokens[0], 16u);
  EXPECT_EQ(first.hit_tokens[1], 16u);
  EXPECT_EQ(begin({"b"}).hit_tokens[0], 16u) << "the second load counts as a hit in host memory";
}

TEST_F(DeviceLoadsTest, a_partial_chunk_hits_its_tokens) {
  for (const auto& [name, end] : {std::pair("whole", 32u), std::pair("part", 36u)}) {
    const Slot slot =
        parts().chunks.insert_filling(key_of(name), 0, parts().take(0), {.depth = end}, kNoTicket);
    parts().chunks.finish_store(slot);
  }
  EXPECT_EQ(begin({"whole", "part"}).hit_tokens[0], 16u + 4u);
}

TEST_F(DeviceLoadsTest, a_load_releases_its_pins_once_if_memory_runs_out) {
  const std::vector<ChunkKey> loaded = keys({"a", "b"});
  bool came = true;
  for (unsigned after = 0; came; ++after) {
    make({});
    for (const char* name : {"a", "b", "c"}) parts().resident(name);
    const auto both = begin({"a", "b"});
    const auto one = begin({"a"});
    EXPECT_EQ(parts().chunks.victim(), parts().chunks.slot_of(parts().chunks.find(key_of("c"))));
    parts().report(both.transfer.ticket);
    {
      const testing::FailingAllocation failing(after);
      try {
        jobs().complete(loaded);
      } catch (const std::bad_alloc&) {
      }
      came = failing.came();
    }
    jobs().poll();
    EXPECT_EQ(parts().chunks.find(key_of("a"))->pins, 1u) << "a rank still copies";
    EXPECT_EQ(parts().chunks.find(key_of("b"))->pins, 0u);
    parts().report(one.transfer.ticket);
    jobs().complete(keys({"a"}));
    std::size_t evicted = 0;
    for (auto victim = parts().chunks.victim(); victim; victim = parts().chunks.victim(), ++evicted)
      parts().chunks.discard(*victim);
    EXPECT_EQ(evicted, 3u);
  }
}

TEST_F(DeviceLoadsTest, rows_of_forgotten_loads_stay_out_of_use_until_reported) {
  parts().resident("a");
  const auto load = begin({"a"});
  jobs().forget();
  parts().chunks.forget();
  EXPECT_EQ(parts().free_rows(), 3u);
  parts().report(load.transfer.ticket);
  jobs().poll();
  EXPECT_EQ(parts().free_rows(), 4u);
}

TEST_F(DeviceLoadsTest, in_a_replicated_cache_all_ranks_report_a_load) {
  make({.workers = 2});
  parts().resident("a");
  const auto load = begin({"a"});
  jobs().forget();
  parts().chunks.forget();
  parts().report(load.transfer.ticket);
  jobs().poll();
  EXPECT_EQ(parts().free_rows(), 3u) << "the other rank may still copy";
  parts().rank->report(1, load.transfer.ticket, 0);
  jobs().poll();
  EXPECT_EQ(parts().free_rows(), 4u);
}

TEST_F(DeviceLoadsTest, with_windows_loads_run_concurrently_only_if_their_requests_fit) {
  PartsOptions options;
  options.shard_bytes = {300, 300};
  options.cache.full_attention = {true, false};
  options.cache.cache_blocks = 12;
  make(std::move(options));
  parts().resident("a");
  EXPECT_FALSE(jobs().must_wait(16)) << "no load is in flight";
  const auto load = begin({"a"}, {.last_end = 16});  // 6 blocks: 2 chunks and a draft in each group
  EXPECT_TRUE(jobs().must_wait(16)) << "6 + 6 blocks, plus one that vLLM reserves";
  jobs().forget();
  EXPECT_TRUE(jobs().must_wait(16)) << "the load may still run";
  parts().report(load.transfer.ticket);
  jobs().poll();
  EXPECT_FALSE(jobs().must_wait(16));
}

}  // namespace
}  // namespace kv_offload
