// Two processes on one root: what one records the other finds, without a restart.
#include <gtest/gtest.h>

#include "fixture.h"
#include "storage/fs/root.h"
#include "with_threads.h"

namespace kv_offload {
namespace {

using namespace testing;

class FsForeignTest : public ::testing::Test {
 protected:
  // Asked once and again while it is not known, as a waiting request asks.
  bool finds(TierUser& user, std::uint32_t number) { return user.has(number); }
  bool finds_in_time(TierUser& user, std::uint32_t number) {
    return user.until([&] { return finds(user, number); });
  }
  TempDir dir_;
  std::string root_ = dir_.path() + "/root";
};

TEST_F(FsForeignTest, a_record_of_one_is_found_and_read_by_the_other) {
  TierUser one(options_for(root_)), other(options_for(root_));
  one.wait_for_scan();
  other.wait_for_scan();
  for (std::uint32_t i = 0; i < 4; ++i) EXPECT_TRUE(one.write(i));
  EXPECT_TRUE(other.write(10));
  for (std::uint32_t i = 0; i < 4; ++i) {
    EXPECT_TRUE(finds_in_time(other, i));
    EXPECT_TRUE(other.read(i));
  }
  EXPECT_TRUE(finds_in_time(one, 10));
  EXPECT_TRUE(one.read(10));
}

TEST_F(FsForeignTest, records_that_come_later_are_found_too) {
  TierUser one(options_for(root_)), other(options_for(root_));
  one.wait_for_scan();
  other.wait_for_scan();
  for (std::uint32_t i = 0; i < 3; ++i) {
    EXPECT_TRUE(one.write(i));
    EXPECT_TRUE(finds_in_time(other, i)) << i;
  }
  EXPECT_EQ(other.tier().stats().chunks, 3u);
}

TEST_F(FsForeignTest, what_the_other_evicts_is_a_miss_not_a_failure) {
  TierUser one(options_for(root_)), other(options_for(root_));
  one.wait_for_scan();
  other.wait_for_scan();
  EXPECT_TRUE(one.write(1));
  EXPECT_TRUE(finds_in_time(other, 1));
  ASSERT_TRUE(fs::remove(path_of(root_, 1)));
  EXPECT_EQ(other.read(1).kind(), StatusKind::kNotFound);
  EXPECT_FALSE(other.has(1));
}

TEST_F(FsForeignTest, namespaces_do_not_see_each_other) {
  FsTierOptions foreign = options_for(root_);
  foreign.namespace_id.fill(0x22);
  TierUser one(options_for(root_)), other(foreign);
  one.wait_for_scan();
  other.wait_for_scan();
  EXPECT_TRUE(one.write(1));
  EXPECT_TRUE(other.write(2));
  TierUser same(options_for(root_));
  EXPECT_TRUE(finds_in_time(same, 1));
  EXPECT_FALSE(other.has(1));
}

}  // namespace
}  // namespace kv_offload
