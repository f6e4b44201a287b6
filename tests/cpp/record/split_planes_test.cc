// SPDX-License-Identifier: Apache-2.0
#include "record/split_planes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "base/aligned_buffer.h"

namespace kv_offload {
namespace {

std::vector<SplitPlanes> known() {
  SplitPlanes ways[kMostSplitPlanes];
  return {ways, ways + split_planes_known(ways)};
}

// Numbers and planes start at odd addresses; the bytes around each are checked too.
struct Planes {
  explicit Planes(std::size_t count) : upper(count + 2, std::byte{0x55}), lower(count + 2, std::byte{0x55}) {}
  bool operator==(const Planes&) const = default;
  std::vector<std::byte> upper, lower;
};

TEST(SplitPlanes, exponent_of_bf16_is_the_upper_byte) {
  for (const SplitPlanes& way : known()) {
    SCOPED_TRACE(way.name);
    std::vector<std::byte> numbers;
    for (int i = 0; i < 64; ++i) {  // 0xC0A5: sign 1, exponent 0x81, mantissa 0x25
      numbers.push_back(std::byte{0xA5});
      numbers.push_back(std::byte{0xC0});
    }
    Planes planes(64);
    way.split(numbers.data(), 64, planes.upper.data(), planes.lower.data());
    EXPECT_EQ(planes.upper[0], std::byte{0x81});
    EXPECT_EQ(planes.upper[63], std::byte{0x81});
    EXPECT_EQ(planes.lower[0], std::byte{0x25 << 1 | 1});
    EXPECT_EQ(planes.lower[63], std::byte{0x25 << 1 | 1});
    EXPECT_EQ(planes.upper[64], std::byte{0x55}) << "wrote beyond the plane";
  }
}

TEST(SplitPlanes, all_implementations_agree_and_join_reverses_split) {
  const auto ways = known();
  ASSERT_STREQ(ways.back().name, "plain");
  std::mt19937 random(1);
  for (std::size_t count = 0; count < 200; ++count) {
    std::vector<std::byte> numbers(2 * count + 1);
    for (std::byte& byte : numbers) byte = static_cast<std::byte>(random());
    Planes expected(count);
    ways.back().split(numbers.data() + 1, count, expected.upper.data() + 1, expected.lower.data() + 1);
    for (const SplitPlanes& way : ways) {
      SCOPED_TRACE(way.name + std::string(", numbers: ") + std::to_string(count));
      Planes planes(count);
      way.split(numbers.data() + 1, count, planes.upper.data() + 1, planes.lower.data() + 1);
      EXPECT_TRUE(planes == expected);
      std::vector<std::byte> joined(2 * count + 2, std::byte{0x55});
      way.join(planes.upper.data() + 1, planes.lower.data() + 1, count, joined.data() + 1);
      EXPECT_TRUE(std::equal(numbers.begin() + 1, numbers.end(), joined.begin() + 1));
      EXPECT_EQ(joined.front(), std::byte{0x55});
      EXPECT_EQ(joined.back(), std::byte{0x55});
    }
  }
}

// All 65,536 numbers, so that any lost bit shows. They are joined into aligned memory, as in rows, and into
// unaligned memory.
TEST(SplitPlanes, every_number_survives_split_and_join) {
  constexpr std::size_t kCount = 1 << 16;
  std::vector<std::byte> numbers(2 * kCount);
  const AlignedBuffer memory(2 * kCount + 1);
  for (std::size_t i = 0; i < kCount; ++i) {
    numbers[2 * i] = static_cast<std::byte>(i);
    numbers[2 * i + 1] = static_cast<std::byte>(i >> 8);
  }
  for (const SplitPlanes& way : known()) {
    Planes planes(kCount);
    way.split(numbers.data(), kCount, planes.upper.data(), planes.lower.data());
    for (const std::size_t offset : {0, 1}) {
      std::byte* joined = memory.data() + offset;
      std::fill_n(joined, 2 * kCount, std::byte{});
      way.join(planes.upper.data(), planes.lower.data(), kCount, joined);
      EXPECT_TRUE(std::equal(numbers.begin(), numbers.end(), joined)) << way.name << ' ' << offset;
    }
  }
}

}  // namespace
}  // namespace kv_offload
