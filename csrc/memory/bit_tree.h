// SPDX-License-Identifier: Apache-2.0
// BitTree: a set of small integers that finds the first member at or after i in O(log64 n). Bitmap words,
// with bitmaps above them that mark the non-empty words.
//
// Value type, not thread-safe.
#pragma once

#include <bit>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace kv_offload {

class BitTree {
 public:
  static constexpr std::size_t kNone = ~std::size_t{0};

  BitTree() = default;
  // {0, ..., size - 1} when `full`, else empty.
  BitTree(std::size_t size, bool full) {
    std::size_t bits = size;
    do {
      const std::size_t words = (bits + 63) / 64;
      auto& level = levels_.emplace_back(words, full ? ~std::uint64_t{0} : 0);
      if (full && bits % 64 != 0) level.back() >>= 64 - bits % 64;
      bits = words;
    } while (bits > 1);
  }

  bool empty() const { return levels_.empty() || levels_.back().empty() || levels_.back().front() == 0; }
  // REQUIRES, like insert() and erase(): i < size.
  bool contains(std::size_t i) const {
    assert(i / 64 < levels_.front().size());
    return (levels_.front()[i / 64] >> (i % 64) & 1) != 0;
  }

  void insert(std::size_t i) {
    for (auto& level : levels_) {
      level[i / 64] |= std::uint64_t{1} << (i % 64);
      i /= 64;
    }
  }

  void erase(std::size_t i) {
    for (auto& level : levels_) {
      level[i / 64] &= ~(std::uint64_t{1} << (i % 64));
      if (level[i / 64] != 0) return;
      i /= 64;
    }
  }

  // Returns the smallest member >= from, or kNone.
  std::size_t first(std::size_t from = 0) const {
    for (std::size_t depth = 0; depth < levels_.size(); ++depth) {
      const auto& level = levels_[depth];
      if (from / 64 >= level.size()) return kNone;
      const std::uint64_t word = level[from / 64] >> (from % 64);
      if (word != 0) return descend(depth, from + static_cast<std::size_t>(std::countr_zero(word)));
      from = from / 64 + 1;
    }
    return kNone;
  }

 private:
  std::size_t descend(std::size_t depth, std::size_t i) const {
    while (depth-- > 0) i = i * 64 + static_cast<std::size_t>(std::countr_zero(levels_[depth][i]));
    return i;
  }

  std::vector<std::vector<std::uint64_t>> levels_;  // [0] has a bit per member
};

}  // namespace kv_offload
