// SPDX-License-Identifier: Apache-2.0
// DigestCache: a bounded cache of the names (encrypted_key_tier.h) of recent keys. Keys mostly arrive in the
// order of their prompt, repeatedly. So entries are stored in the order of their first arrival, and the entry
// after the last one found is checked first.
//
// One thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "base/segmented_vector.h"
#include "base/types.h"
#include "policy/id_table.h"

namespace kv_offload {

class DigestCache {
 public:
  static constexpr std::size_t kDigestBytes = 16;  // a name is the digest and the last four bytes of the key
  using Place = std::uint32_t;
  // Returns the name of `key` under encryption key number `way`.
  using NameOf = std::function<ChunkKey(const ChunkKey& key, std::size_t way)>;

  // most: at least 1.
  DigestCache(std::size_t ways, std::size_t most, NameOf name_of)
      : ways_(ways), most_(most), name_of_(std::move(name_of)), computed_(ways) {}

  // Returns the key's place and adds the key if it is new. The place is valid until the next call.
  Place place_of(const ChunkKey& key) {
    if (next_ < entries_.size() && entries_[next_].key == key) return static_cast<Place>(next_++);
    const ChunkId id = chunk_id(key);
    Place place = places_.find(id, id_at());
    if (place == IdTable::kNone) {
      place = static_cast<Place>(oldest_);
      if (place < entries_.size()) forget(place);
      entries_.grow_to(std::size_t{place} + 1);
      digests_.grow_to((std::size_t{place} + 1) * ways_);
      fill(place, key);
      places_.find_or_add(id, id_at(), [&] { return place; });
      oldest_ = (oldest_ + 1) % most_;
    } else if (entries_[place].key != key) {  // two keys share one hash: the later one stays
      fill(place, key);
    }
    next_ = std::size_t{place} + 1;
    return place;
  }
  // Returns nullopt if the key was never added, or too long ago.
  std::optional<Place> find(ChunkId id) const {
    const Place place = places_.find(id, id_at());
    return place == IdTable::kNone ? std::nullopt : std::optional(place);
  }
  ChunkKey name(Place place, std::size_t way) const {
    char name[kDigestBytes + 4];
    const std::string_view key = entries_[place].key.bytes();
    std::memcpy(name, digests_[place * ways_ + way].bytes, kDigestBytes);
    std::memcpy(name + kDigestBytes, key.data() + key.size() - 4, 4);
    return ChunkKey::unchecked(name, sizeof(name));
  }
  // The way under which the caller last found the record; initially 0.
  std::uint32_t& way(Place place) { return entries_[place].way; }

 private:
  struct Entry {
    ChunkKey key;
    std::uint32_t way = 0;
  };
  struct Digest {
    char bytes[kDigestBytes];
  };
  struct IdAt {
    const DigestCache& names;
    ChunkId operator()(Place place) const { return chunk_id(names.entries_[place].key); }
  };
  IdAt id_at() const { return {*this}; }
  void fill(Place place, const ChunkKey& key) {
    // All digests first: name_of_ may throw, and the key that is stored there must then keep its own digests.
    for (std::size_t way = 0; way < ways_; ++way)
      std::memcpy(computed_[way].bytes, name_of_(key, way).bytes().data(), kDigestBytes);
    for (std::size_t way = 0; way < ways_; ++way) digests_[place * ways_ + way] = computed_[way];
    entries_[place] = {key, 0};
  }
  void forget(Place place) {
    if (entries_[place].key.size() == 0) return;  // its names could not be computed
    const ChunkId id = id_at()(place);
    // The index may lack the entry if memory ran out while it was added.
    if (places_.find(id, id_at()) == place) places_.erase(id, id_at());
  }

  const std::size_t ways_;
  const std::size_t most_;
  const NameOf name_of_;
  std::vector<Digest> computed_;  // of one key
  SegmentedVector<Entry> entries_;
  SegmentedVector<Digest> digests_;  // ways_ for each entry
  IdTable places_;
  std::size_t next_ = 0;    // after the entry found last
  std::size_t oldest_ = 0;  // the next new key's place
};

}  // namespace kv_offload
