// SPDX-License-Identifier: Apache-2.0
#include "cache/pass_scans.h"

#include "cache/parts.h"

namespace kv_offload {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

// A pass is written as one word per group, lower groups first: H hit, F fetching, f filling,
// R recorded, U unknown, M miss.
class PassScansTest : public ::testing::Test {
 protected:
  PassScansTest() : parts_(options()) {}
  static PartsOptions options() {
    PartsOptions options;
    options.rows = 16;
    options.shard_bytes = {300, 300};
    options.cache.full_attention = {true, false};
    return options;
  }
  void see(std::uint16_t group, const std::string& answers) {
    using Kind = Lookup::Kind;
    for (const char answer : answers) {
      const std::string name = fmt::format("k{}", pass_.lookups.size());
      Lookup lookup;
      lookup.group = group;
      if (answer == 'H') lookup = {parts_.resident(name, group), group, Kind::kHit, 0};
      if (answer == 'F') lookup = {parts_.fetching(name, group), group, Kind::kFetching, 0};
      if (answer == 'f') lookup = {parts_.filling(name, kNoTicket, group), group, Kind::kFilling, 0};
      if (answer == 'U') lookup.kind = Kind::kUnknown;
      if (answer == 'R') {
        lookup = {static_cast<std::uint32_t>(pass_.keys.size()), group, Kind::kRecorded, 2};
        pass_.keys.push_back({key_of(name, group)});
      }
      pass_.lookups.push_back(lookup);
    }
  }
  Scans scans() { return scans_of(pass_, parts_.groups, parts_.chunks); }
  static std::vector<ChunkId> parents(const Scan& scan) {
    std::vector<ChunkId> result;
    for (const auto& candidate : scan.candidates) result.push_back(candidate.parent);
    return result;
  }

  ChunkParts parts_;
  LookupPass pass_;
};

TEST_F(PassScansTest, a_prefix_reports_its_hits_and_pending_chunks) {
  see(0, "HFRM");
  const Scans all = scans();
  ASSERT_THAT(all, SizeIs(1));
  EXPECT_TRUE(all[0].is_prefix);
  EXPECT_TRUE(all[0].pending);
  EXPECT_THAT(all[0].hits, SizeIs(1));
  EXPECT_THAT(all[0].fetching, SizeIs(1));
  EXPECT_THAT(parents(all[0]), ElementsAre(chunk_id(key_of("k1"))));
}

TEST_F(PassScansTest, a_pass_of_hits_and_misses_awaits_nothing) {
  see(0, "HHM");
  EXPECT_FALSE(scans()[0].pending);
}

TEST_F(PassScansTest, chunks_that_a_window_scan_saw_before_a_miss_are_not_needed) {
  see(1, "RRMR");
  const Scans all = scans();
  EXPECT_FALSE(all[0].is_prefix);
  EXPECT_THAT(all[0].candidates, SizeIs(1));
  EXPECT_EQ(all[0].candidates[0].key, 2u);
  EXPECT_THAT(parents(all[0]), ElementsAre(0)) << "scanned from the right";
}

TEST_F(PassScansTest, the_last_scan_of_a_group_counts) {
  see(0, "R");
  see(1, "R");
  see(0, "H");
  const Scans all = scans();
  ASSERT_THAT(all, SizeIs(2));
  EXPECT_EQ(all[0].group, 1u);
  EXPECT_EQ(all[1].group, 0u);
  EXPECT_THAT(all[1].candidates, IsEmpty());
}

TEST_F(PassScansTest, an_evicted_chunk_is_not_a_parent) {
  see(0, "HR");
  parts_.chunks.discard(pass_.lookups[0].index);
  EXPECT_THAT(parents(scans()[0]), ElementsAre(0));
}

TEST_F(PassScansTest, stretches_begin_after_the_hits_and_are_split_by_tier) {
  see(0, "HHRRfRM");
  const Loadable loadable = loadable_of(pass_, scans(), parts_.groups);
  EXPECT_EQ(loadable.hits_before, 2u);
  ASSERT_THAT(loadable.stretches, SizeIs(3));
  EXPECT_EQ(loadable.stretches[0].tier, 2);
  EXPECT_EQ(loadable.stretches[0].chunks, 2u);
  EXPECT_EQ(loadable.stretches[0].tokens, 32u);
  EXPECT_EQ(loadable.stretches[1].tier, Stretch::kHostMemory);
  EXPECT_EQ(loadable.stretches[2].chunks, 1u);
}

TEST_F(PassScansTest, a_window_counts_the_tokens_of_the_found_prefix) {
  see(0, "HHH");
  see(1, "R");
  Scans all = scans();
  all.erase(all.begin());
  const Loadable loadable = loadable_of(pass_, all, parts_.groups);
  ASSERT_THAT(loadable.stretches, SizeIs(1));
  EXPECT_EQ(loadable.stretches[0].chunks, 1u);
  EXPECT_EQ(loadable.stretches[0].tokens, 48u);
}

TEST_F(PassScansTest, keep_first_counts_tokens_from_the_start_of_the_scan) {
  see(0, "HRRR");
  Scans all = scans();
  keep_first(&all, 48, pass_, parts_.groups);
  EXPECT_THAT(all[0].candidates, SizeIs(2));
  keep_first(&all, 480, pass_, parts_.groups);
  EXPECT_THAT(all[0].candidates, SizeIs(2));
}

}  // namespace
}  // namespace kv_offload
