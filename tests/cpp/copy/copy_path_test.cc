// SPDX-License-Identifier: Apache-2.0
#include "copy/copy_path.h"

#include <gtest/gtest.h>

namespace kv_offload {
namespace {

using enum CopyDirection;
constexpr std::uint64_t kMiB = 1 << 20;

// A machine model with three numbers per path.
struct FakeLink {
  double dma_rate = 50e9, dma_per_segment = 3e-6;
  double kernel_rate = 40e9;
  double staged_rate = 30e9;
  double operator()(CopyPath path, std::uint64_t segment, std::uint64_t total) const {
    switch (path) {
      case CopyPath::kDma:
        return static_cast<double>(total) / dma_rate + static_cast<double>(total / segment) * dma_per_segment;
      case CopyPath::kKernel:
        return static_cast<double>(total) / kernel_rate;
      case CopyPath::kStaged:
        return static_cast<double>(total) / staged_rate;
    }
    return 0;
  }
};

CopyTable calibrate_for(const FakeLink& link, double budget = 1.0, double* clock = nullptr) {
  double now = 0;
  double& time = clock != nullptr ? *clock : now;
  return calibrate({.measure =
                        [&](CopyDirection, CopyPath path, std::uint64_t segment, std::uint64_t total) {
                          const double seconds = link(path, segment, total);
                          time += seconds;
                          return seconds;
                        },
                    .spent = [&] { return time; },
                    .budget_seconds = budget});
}

TEST(CopyPath, small_pages_use_the_kernel_and_long_runs_dma) {
  const CopyTable table = default_copy_table();
  for (const CopyDirection direction : {kStore, kLoad}) {
    EXPECT_EQ(choose_path(table, direction, 64 * kMiB, 64 * kMiB / (16 << 10)), CopyPath::kKernel);
    EXPECT_EQ(choose_path(table, direction, 64 * kMiB, 32), CopyPath::kDma);
  }
}

TEST(CopyPath, a_single_small_segment_uses_dma) {
  EXPECT_EQ(choose_path(default_copy_table(), kStore, 4096, 1), CopyPath::kDma);
}

TEST(CopyPath, the_kernel_is_chosen_only_if_clearly_faster) {
  CopyTable table = default_copy_table();
  table.launch_seconds = {};
  for (auto& paths : table.rates) {
    paths[0].fill(40e9);
    paths[1].fill(44e9);
    paths[2].fill(0);
  }
  EXPECT_EQ(choose_path(table, kLoad, 64 * kMiB, 1000), CopyPath::kDma);
  for (auto& paths : table.rates) paths[1].fill(48e9);
  EXPECT_EQ(choose_path(table, kLoad, 64 * kMiB, 1000), CopyPath::kKernel);
}

TEST(CopyPath, a_copy_without_waiters_uses_dma_unless_far_slower) {
  CopyTable table = default_copy_table();
  table.launch_seconds = {};
  const auto beside = [&](double dma_rate) {
    for (auto& paths : table.rates) {
      paths[0].fill(dma_rate);
      paths[1].fill(40e9);
      paths[2].fill(20e9);
    }
    return choose_path(table, kStore, 64 * kMiB, 1000, CopyUrgency::kBackground);
  };
  EXPECT_EQ(beside(40e9 / kMaxBackgroundSlowdown * 1.01), CopyPath::kDma);
  EXPECT_EQ(choose_path(table, kStore, 64 * kMiB, 1000), CopyPath::kKernel);
  EXPECT_EQ(beside(40e9 / kMaxBackgroundSlowdown * 0.99), CopyPath::kKernel);
  EXPECT_EQ(beside(0), CopyPath::kKernel);
}

TEST(CopyPath, a_path_without_a_rate_is_the_last_choice) {
  CopyTable table = default_copy_table();
  for (auto& paths : table.rates) paths[0].fill(0);
  EXPECT_EQ(choose_path(table, kLoad, 64 * kMiB, 1), CopyPath::kKernel);
  for (auto& paths : table.rates) paths[1].fill(0);
  EXPECT_EQ(choose_path(table, kLoad, 64 * kMiB, 1), CopyPath::kStaged);
  for (auto& paths : table.rates) paths[2].fill(0);
  EXPECT_EQ(choose_path(table, kLoad, 64 * kMiB, 1), CopyPath::kDma);
}

TEST(CopyTable, rates_are_interpolated_between_columns_and_constant_beyond) {
  CopyTable table;
  table.rates[0][0] = {10, 20, 30, 40, 50, 60, 70};
  EXPECT_EQ(table.rate(kStore, CopyPath::kDma, 1), 10);
  EXPECT_EQ(table.rate(kStore, CopyPath::kDma, 4 << 10), 10);
  EXPECT_EQ(table.rate(kStore, CopyPath::kDma, 10 << 10), 15);
  EXPECT_EQ(table.rate(kStore, CopyPath::kDma, 16 << 10), 20);
  EXPECT_EQ(table.rate(kStore, CopyPath::kDma, 1ull << 40), 70);
}

TEST(Calibrate, calibration_finds_the_size_where_dma_becomes_faster) {
  const CopyTable table = calibrate_for({});
  EXPECT_TRUE(table.measured);
  // 3 us per segment at 50 GB/s is faster than 40 / 1.15 GB/s from about 350 KiB.
  EXPECT_EQ(choose_path(table, kStore, 64 * kMiB, 64 * kMiB / (64 << 10)), CopyPath::kKernel);
  EXPECT_EQ(choose_path(table, kStore, 64 * kMiB, 64 * kMiB / (1 << 20)), CopyPath::kDma);
  // A device whose descriptors cost nothing never needs the SMs.
  const CopyTable fast = calibrate_for({.dma_per_segment = 1e-9});
  for (const std::uint64_t segment : CopyTable::kSegmentBytes) {
    EXPECT_EQ(choose_path(fast, kLoad, 64 * kMiB, 64 * kMiB / segment), CopyPath::kDma);
  }
}

TEST(Calibrate, staging_is_chosen_where_kernel_copies_are_slow) {
  const CopyTable table = calibrate_for({.kernel_rate = 5e9});
  EXPECT_EQ(choose_path(table, kStore, 64 * kMiB, 64 * kMiB / (16 << 10)), CopyPath::kStaged);
}

TEST(Calibrate, calibration_stays_in_budget_and_scales_unmeasured_sizes) {
  double time = 0;
  const FakeLink slow{.dma_rate = 5e9, .kernel_rate = 4e9, .staged_rate = 3e9};
  const CopyTable table = calibrate_for(slow, 0.03, &time);
  EXPECT_LT(time, 0.06);  // exceeds the budget by one step at most
  EXPECT_TRUE(table.measured);
  // The slow link also affects columns that were not measured.
  EXPECT_LT(table.rate(kStore, CopyPath::kKernel, 4 << 20), 10e9);
}

TEST(Calibrate, an_unmeasured_path_is_scaled_like_dma) {
  const CopyTable slow = calibrate_for({.dma_rate = 0.4e9, .dma_per_segment = 1e-9}, 1e-9);
  EXPECT_TRUE(slow.measured);
  for (const CopyDirection direction : {kStore, kLoad}) {
    EXPECT_LT(slow.rate(direction, CopyPath::kStaged, 4 << 20), 8e9);
    EXPECT_LT(slow.rate(direction, CopyPath::kKernel, 4 << 20), 8e9);
  }
}

TEST(Calibrate, without_a_time_budget_default_rates_are_used) {
  const CopyTable table = calibrate_for({}, 0.0);
  EXPECT_FALSE(table.measured);
  EXPECT_EQ(table.rates, default_copy_table().rates);
}

TEST(CopyTable, the_description_names_the_path_for_each_size) {
  const std::string text = default_copy_table().describe();
  EXPECT_NE(text.find("built-in; store kernel from 4 KiB"), std::string::npos) << text;
  EXPECT_NE(text.find("dma from"), std::string::npos) << text;
}

}  // namespace
}  // namespace kv_offload
