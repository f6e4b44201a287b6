// KnownNames: the names (sealed_names.h) of the last keys that came by, up to a bound. Keys mostly come in
// the order of their prompt, again and again: entries are stored in the order in which they came first, and
// the one behind the last that was found is looked at first.
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

class KnownNames {
 public:
  static constexpr std::size_t kDigestBytes = 16;  // a name is these and the last four bytes of the key
  using Place = std::uint32_t;
  // The name of `key` under key `way` of the list.
  using NameOf = std::function<ChunkKey(const ChunkKey& key, std::size_t way)>;

  // most: at least 1.
  KnownNames(std::size_t ways, std::size_t most, NameOf name_of)
      : ways_(ways), most_(most), name_of_(std::move(name_of)), computed_(ways) {}

  // Remembers it if it is new. A place is the key's until the next call.
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
      places_.at(id, id_at()) = place;
      oldest_ = (oldest_ + 1) % most_;
    } else if (entries_[place].key != key) {  // of the same hash: the later one stays
      fill(place, key);
    }
    next_ = std::size_t{place} + 1;
    return place;
  }
  // Nothing: it did not come by, or too long ago.
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
  // Under which it was present last: the caller's, 0 at first.
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
    const KnownNames& names;
    ChunkId operator()(Place place) const { return chunk_id(names.entries_[place].key); }
  };
  IdAt id_at() const { return {*this}; }
  void fill(Place place, const ChunkKey& key) {
    // All of them first: name_of_ may throw, and the key that is stored there keeps its own digests then.
    for (std::size_t way = 0; way < ways_; ++way)
      std::memcpy(computed_[way].bytes, name_of_(key, way).bytes().data(), kDigestBytes);
    for (std::size_t way = 0; way < ways_; ++way) digests_[place * ways_ + way] = computed_[way];
    entries_[place] = {key, 0};
  }
  void forget(Place place) {
    if (entries_[place].key.size() == 0) return;  // its names could not be computed
    const ChunkId id = id_at()(place);
    if (places_.find(id, id_at()) == place) places_.erase(id, id_at());  // not when memory ran out meanwhile
  }

  const std::size_t ways_;
  const std::size_t most_;
  const NameOf name_of_;
  std::vector<Digest> computed_;  // of one key
  SegmentedVector<Entry> entries_;
  SegmentedVector<Digest> digests_;  // ways_ for each entry
  IdTable places_;
  std::size_t next_ = 0;    // behind the one that was found last
  std::size_t oldest_ = 0;  // the next new key's place
};

}  // namespace kv_offload
