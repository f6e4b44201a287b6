#include "policy/ghost_list.h"

#include <gtest/gtest.h>

#include "step_watch.h"

namespace kv_offload {
namespace {

ChunkId id_of(std::uint64_t n) { return n * 0x9E3779B97F4A7C15ull | 1; }

TEST(GhostList, RemembersTheLastOnesOnly) {
  GhostList ghosts;
  EXPECT_FALSE(ghosts.contains(id_of(1)));
  for (std::uint64_t n = 1; n <= 8; ++n) ghosts.add(id_of(n), 4);
  for (std::uint64_t n = 1; n <= 4; ++n) EXPECT_FALSE(ghosts.contains(id_of(n))) << n;
  EXPECT_TRUE(ghosts.contains(id_of(8)));
}

TEST(GhostList, MostOfAFullListIsRemembered) {
  GhostList ghosts;
  for (std::uint64_t n = 1; n <= 1000; ++n) ghosts.add(id_of(n), 1000);
  int found = 0;
  for (std::uint64_t n = 1; n <= 1000; ++n) found += ghosts.contains(id_of(n));
  EXPECT_GT(found, 700);
}

TEST(GhostList, IsBoundedByWhatItIsToRemember) {
  GhostList ghosts;
  for (std::uint64_t n = 1; n <= 100000; ++n) ghosts.add(id_of(n), 100);
  EXPECT_LE(ghosts.cells(), 256u);
}

TEST(GhostList, GrowingForgetsNothing) {
  GhostList ghosts;
  ghosts.add(id_of(1), 4);
  ghosts.add(id_of(2), 400);
  EXPECT_TRUE(ghosts.contains(id_of(1)));
  EXPECT_TRUE(ghosts.contains(id_of(2)));
}

// What left while the list was short is found when it has grown, whatever its length then.
TEST(GhostList, GrowsAFewCellsACallAndForgetsNothingByIt) {
  GhostList ghosts;
  EXPECT_LT(testing::steps_of([&] { ghosts.add(id_of(1), 1'000'000); }), 100u);
  int found = 0;
  for (std::uint64_t n = 2; n <= 20'000; ++n) {
    ASSERT_LT(testing::steps_of([&] { ghosts.add(id_of(n), 1'000'000); }), 100u);
    if ((n & (n - 1)) == 0) {
      found = 0;
      for (std::uint64_t m = 1; m <= n; ++m) found += ghosts.contains(id_of(m));
      ASSERT_GT(10 * found, 8 * static_cast<int>(n)) << n;
    }
  }
  EXPECT_GT(found, 0);
}

}  // namespace
}  // namespace kv_offload
