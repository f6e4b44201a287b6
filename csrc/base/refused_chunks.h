// SPDX-License-Identifier: Apache-2.0
// The word in which a rank reports the chunks of a store job that must never become a hit. The words of all
// ranks are combined with |.
//
//   bit g        all chunks of group position g: it is unknown which of them lack blocks
//   bit 32 + g   the first chunk of group position g in the job: its leading blocks are missing
//   all bits     the device failed, or the report was lost: all chunks of all groups
//
// Bits 31 and 63 belong to no group, which distinguishes a device failure from refusals.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kv_offload {

inline constexpr std::size_t kMostGroups = 31;
inline constexpr std::uint64_t kDeviceFailed = ~std::uint64_t{0};

constexpr std::uint64_t refused_group(std::size_t group) { return std::uint64_t{1} << group; }
constexpr std::uint64_t refused_first(std::size_t group) { return std::uint64_t{1} << (32 + group); }
// True if a chunk must not become a hit. `first`: it is the first chunk of its group in the job.
constexpr bool is_refused(std::uint64_t word, std::size_t group, bool first) {
  return (word & refused_group(group)) != 0 || (first && (word & refused_first(group)) != 0);
}

}  // namespace kv_offload
