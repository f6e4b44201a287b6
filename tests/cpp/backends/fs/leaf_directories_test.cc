// SPDX-License-Identifier: Apache-2.0
// Directory growth, reported once.
#include "backends/fs/leaf_directories.h"

#include <gtest/gtest.h>

namespace kv_offload {
namespace {

TEST(LeafDirectoriesTest, growth_is_reported_once_and_not_for_a_first_size) {
  LeafDirectories leaves;
  EXPECT_EQ(leaves.update_size(7, 4096), 0u);
  EXPECT_EQ(leaves.update_size(7, 12288), 8192u);
  EXPECT_EQ(leaves.update_size(7, 12288), 0u);
  EXPECT_EQ(leaves.update_size(8, 12288), 0u) << "another directory";
  EXPECT_EQ(leaves.update_size(7, 4096), 0u) << "it was emptied and created again";
  EXPECT_EQ(leaves.update_size(7, 8192), 4096u);
}

TEST(LeafDirectoriesTest, the_total_growth_excludes_the_first_page_of_each_directory) {
  LeafDirectories leaves;
  EXPECT_EQ(leaves.growth(), 0u);
  (void)leaves.update_size(7, 12288);
  (void)leaves.update_size(8, 4096);
  (void)leaves.update_size(9, 0);
  (void)leaves.update_size(255, 8192);
  EXPECT_EQ(leaves.growth(), 12288u);
}

TEST(LeafDirectoriesTest, each_name_becomes_durable_separately) {
  LeafDirectories leaves;
  leaves.set_durable(3);
  EXPECT_TRUE(leaves.is_durable(3));
  EXPECT_FALSE(leaves.is_durable(4));
}

}  // namespace
}  // namespace kv_offload
