// SPDX-License-Identifier: Apache-2.0
// KeyHistory: remembers why keys that are not here were evicted or lost, and how often they were used.
// Bounded: a direct-mapped table of fingerprints. A key may overwrite the entry of another key, but is
// mistaken for it only with probability 2^-53.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <optional>

#include "base/types.h"
#include "base/zeroed_memory.h"

namespace kv_offload {

class KeyHistory {
 public:
  static constexpr std::size_t kMinCells = std::size_t{1} << 12;
  static constexpr std::size_t kMaxCells = std::size_t{1} << 20;
  static constexpr std::uint32_t kMaxUses = 127;

  // Remembers about `keys` keys, at most kMaxCells (8 bytes each).
  explicit KeyHistory(std::size_t keys) : cells_(std::bit_ceil(std::clamp(keys, kMinCells, kMaxCells))) {}

  // `reason` < 15; the caller defines the numbering.
  void record_removal(const ChunkKey& key, std::uint8_t reason) {
    std::uint64_t& cell = claim_cell(key);
    cell = (cell & ~kReasonMask) | (std::uint64_t{reason} + 1);
  }
  // Prefetches the cell of a key that is recorded or looked up soon.
  void prefetch(const ChunkKey& key) const { __builtin_prefetch(&cells_[place(fingerprint(key))]); }
  std::optional<std::uint8_t> eviction_reason(const ChunkKey& key) const {
    return eviction_reason(fingerprint(key));
  }
  std::optional<std::uint8_t> eviction_reason(std::uint64_t print) const {
    const std::uint64_t cell = cells_[place(print)];
    if ((cell & kPrintMask) != (print & kPrintMask) || (cell & kReasonMask) == 0) return std::nullopt;
    return static_cast<std::uint8_t>((cell & kReasonMask) - 1);
  }
  // Returns how often this key was used, including this use; saturates at kMaxUses.
  std::uint32_t count_use(const ChunkKey& key) {
    std::uint64_t& cell = claim_cell(key);
    std::uint64_t uses = (cell & kUsesMask) >> kUsesShift;
    uses = std::min<std::uint64_t>(uses + 1, kMaxUses);
    cell = (cell & ~kUsesMask) | uses << kUsesShift;
    return static_cast<std::uint32_t>(uses);
  }
  // O(1). If memory runs out, throws and changes nothing.
  void clear() { ZeroedTable<std::uint64_t>(cells_.size()).swap(cells_); }

  static std::uint64_t fingerprint(const ChunkKey& key) {
    // ChunkKey::Hash alone is not enough: mix in the end of the digest.
    std::uint64_t tail;
    std::memcpy(&tail, key.bytes().data() + (key.size() > 12 ? key.size() - 12 : 0), sizeof(tail));
    std::uint64_t mixed = ChunkKey::Hash{}(key) ^ (tail * 0x9FB21C651E98DF25ull);
    mixed ^= mixed >> 29;
    return mixed * 0xBF58476D1CE4E5B9ull;
  }

 private:
  static constexpr std::uint64_t kReasonMask = 0xF;
  static constexpr unsigned kUsesShift = 4;
  static constexpr std::uint64_t kUsesMask = std::uint64_t{kMaxUses} << kUsesShift;
  static constexpr std::uint64_t kPrintMask = ~std::uint64_t{0x7FF};

  std::size_t place(std::uint64_t print) const { return (print >> 11) & (cells_.size() - 1); }
  std::uint64_t& claim_cell(const ChunkKey& key) {
    const std::uint64_t print = fingerprint(key);
    std::uint64_t& cell = cells_[place(print)];
    if ((cell & kPrintMask) != (print & kPrintMask)) cell = print & kPrintMask;
    return cell;
  }

  ZeroedTable<std::uint64_t> cells_;
};

}  // namespace kv_offload
