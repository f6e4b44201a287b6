// SPDX-License-Identifier: Apache-2.0
#include "cache/transfer_model.h"

#include <gtest/gtest.h>

namespace kv_offload {
namespace {

class TransferModelTest : public ::testing::Test {
 protected:
  // Observes queues of 1 to `records` records of 1,000 bytes.
  void read(int records, double latency, double bytes_per_second) {
    for (int i = 1; i <= records; ++i) model_.observe(1000.0 * i, latency + 1000.0 * i / bytes_per_second);
  }
  TransferModel model_;
};

TEST_F(TransferModelTest, nothing_is_known_before_the_first_sample) {
  EXPECT_FALSE(model_.known());
  EXPECT_EQ(model_.seconds(1000), 0);
}

TEST_F(TransferModelTest, latency_and_rate_are_distinguished) {
  read(8, 0.01, 1e6);
  EXPECT_TRUE(model_.is_separable());
  EXPECT_NEAR(model_.latency(), 0.01, 1e-9);
  EXPECT_NEAR(model_.bytes_per_second(), 1e6, 1);
  EXPECT_NEAR(model_.seconds(1e6), 1.01, 1e-6);
}

TEST_F(TransferModelTest, with_one_size_all_time_counts_as_rate) {
  for (int i = 0; i < 5; ++i) model_.observe(1000, 0.002);
  EXPECT_FALSE(model_.is_separable());
  EXPECT_NEAR(model_.seconds(5000), 0.01, 1e-9);
}

TEST_F(TransferModelTest, only_the_newest_samples_of_each_size_count) {
  read(32, 0, 1e6);
  for (std::size_t i = 0; i < TransferModel::kSamplesPerSize; ++i) read(32, 0, 1e3);
  EXPECT_NEAR(model_.bytes_per_second(), 1e3, 1);
}

TEST_F(TransferModelTest, many_large_samples_do_not_hide_the_latency) {
  read(2048, 0.01, 1e6);
  EXPECT_NEAR(model_.latency(), 0.01, 1e-6);
}

TEST_F(TransferModelTest, large_samples_that_vary_do_not_hide_the_latency) {
  for (int i = 0; i < 4; ++i) model_.observe(1000, 0.011);
  model_.observe(1e6, 1.06);
  model_.observe(2e6, 1.91);
  EXPECT_NEAR(model_.seconds(1000), 0.011, 0.002);
}

TEST_F(TransferModelTest, a_size_without_new_samples_is_forgotten) {
  read(300, 0, 1e6);
  for (std::uint64_t i = 0; i < TransferModel::kOld; ++i) model_.observe(1000, 1);
  EXPECT_NEAR(model_.seconds(1000), 1, 1e-6);
}

TEST_F(TransferModelTest, an_overdue_read_replaces_a_better_estimate) {
  read(32, 0, 1e6);
  model_.on_overdue(1000, 0.0005);  // not late yet
  EXPECT_NEAR(model_.bytes_per_second(), 1e6, 1);
  model_.on_overdue(1000, 2);
  EXPECT_NEAR(model_.seconds(1000), 2, 1e-9);
}

TEST_F(TransferModelTest, times_that_grow_faster_than_bytes_give_no_negative_latency) {
  model_.observe(1000, 0.001);
  model_.observe(100'000, 0.2);
  EXPECT_EQ(model_.latency(), 0);
  EXPECT_GT(model_.seconds(100), 0);
}

TEST_F(TransferModelTest, falling_times_give_no_negative_rate) {
  model_.observe(1000, 0.2);
  model_.observe(9000, 0.1);
  EXPECT_GE(model_.seconds(1e6), 0);
  EXPECT_GE(model_.latency(), 0);
}

}  // namespace
}  // namespace kv_offload
