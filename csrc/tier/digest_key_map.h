// SPDX-License-Identifier: Apache-2.0
// DigestKeyMap: maps digests (encrypted_key_tier.h) back to a bounded number of keys. Each digest hashes to
// two sets of cells and its key is put into the emptier one, so sets are full only when nearly all cells are
// used. With three quarters of the cells in use hardly any key is forgotten; with all of them some 4 in 100
// are. If both sets are full, the first set forgets its oldest key.
//
// One thread.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <optional>

#include "base/types.h"

namespace kv_offload {

// A zeroed table whose untouched pages take no memory.
template <typename T>
class LazyTable {
 public:
  explicit LazyTable(std::size_t size) : data_(static_cast<T*>(std::calloc(size, sizeof(T)))) {
    if (data_ == nullptr) throw std::bad_alloc();
  }
  ~LazyTable() { std::free(data_); }
  LazyTable(const LazyTable&) = delete;
  LazyTable& operator=(const LazyTable&) = delete;
  T& operator[](std::size_t at) { return data_[at]; }

 private:
  T* data_;
};

class DigestKeyMap {
 public:
  static constexpr std::size_t kWays = 8;

  // REQUIRES: `cells` is a multiple of kWays.
  explicit DigestKeyMap(std::size_t cells) : sets_(cells / kWays), table_(cells) {}

  void remember(const ChunkKey& digest, const ChunkKey& key) {
    const std::array<ChunkKey*, 2> sets = sets_of(digest);
    std::array<std::size_t, 2> used{};
    for (std::size_t i = 0; i < sets.size(); ++i) {
      while (used[i] < kWays && sets[i][used[i]].size() > 0) {
        if (sets[i][used[i]++] == key) return;
      }
    }
    ChunkKey* set = sets[used[1] < used[0] ? 1 : 0];
    std::move_backward(set, set + kWays - 1, set + kWays);
    set[0] = key;
  }
  // Returns the key and forgets it, which frees its cell. For digests whose record was removed.
  template <typename Matches>
  std::optional<ChunkKey> take(const ChunkKey& digest, Matches&& matches) {
    for (ChunkKey* set : sets_of(digest)) {
      for (std::size_t i = 0; i < kWays && set[i].size() > 0; ++i) {
        if (!matches(set[i])) continue;
        const ChunkKey key = set[i];
        std::move(set + i + 1, set + kWays, set + i);
        set[kWays - 1] = ChunkKey();
        return key;
      }
    }
    return std::nullopt;
  }

 private:
  // Used cells come first in a set, the newest in front.
  std::array<ChunkKey*, 2> sets_of(const ChunkKey& digest) {
    const std::uint64_t hash = ChunkKey::Hash{}(digest);
    return {&table_[hash % sets_ * kWays], &table_[(hash >> 32) % sets_ * kWays]};
  }

  const std::size_t sets_;
  LazyTable<ChunkKey> table_;
};

}  // namespace kv_offload
