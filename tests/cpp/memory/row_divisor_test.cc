// SPDX-License-Identifier: Apache-2.0
#include "memory/row_divisor.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace kv_offload {
namespace {

TEST(RowDivisor, each_row_is_divided_exactly) {
  std::mt19937_64 random(7);
  const auto check = [](std::uint32_t pages, std::uint64_t row) {
    if (row > kNoRow) return;
    ASSERT_EQ(RowDivisor(pages)(static_cast<RowId>(row)), row / pages) << row << " / " << pages;
  };
  std::vector<std::uint32_t> divisors = {1,   2,          3,          5,          7,         16,
                                         641, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFE, 0xFFFFFFFF};
  for (int i = 0; i < 500; ++i)
    divisors.push_back(std::max(1u, static_cast<std::uint32_t>(random() >> (32 + random() % 32))));
  for (const std::uint32_t pages : divisors) {
    const std::uint64_t last = kNoRow / pages;
    // Next to multiples, where an error of the factor shows first.
    for (const std::uint64_t multiple : {std::uint64_t{0}, std::uint64_t{1}, last / 2, last - 1, last}) {
      for (const std::uint64_t before : {0, 1})
        check(pages, multiple * pages - std::min(multiple * pages, before));
      check(pages, multiple * pages + 1);
    }
    check(pages, kNoRow);
    for (int i = 0; i < 20; ++i) check(pages, random() >> 32);
  }
}

}  // namespace
}  // namespace kv_offload
