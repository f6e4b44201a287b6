// SPDX-License-Identifier: Apache-2.0
// RowDivisor: divides row numbers by a fixed number of pages, with a multiplication. A division takes up to
// 26 cycles, and a store divides several times for each chunk.
#pragma once

#include <cstdint>

#include "base/types.h"

namespace kv_offload {

class RowDivisor {
 public:
  // REQUIRES: pages > 0.
  explicit RowDivisor(std::uint32_t pages) : factor_(~std::uint64_t{0} / pages) {}

  // Returns row / pages, exactly: factor_ is less than 2^64 / pages by so little that the product with row +
  // 1 is less than (row + 1) / pages by at most 2^-32.
  std::uint32_t operator()(RowId row) const {
    return static_cast<std::uint32_t>(static_cast<unsigned __int128>(factor_) * (std::uint64_t{row} + 1) >>
                                      64);
  }

 private:
  std::uint64_t factor_;
};

}  // namespace kv_offload
