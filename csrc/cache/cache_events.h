// SPDX-License-Identifier: Apache-2.0
// CacheEvents: records which chunks host memory and the tiers gained and lost, until the caller takes the
// events. Consecutive changes of the same kind share one event. Records nothing unless `keep` is set.
//
// Threads: one (the scheduler's).
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cache/cache_types.h"

namespace kv_offload {

class CacheEvents {
 public:
  explicit CacheEvents(bool keep) : keep_(keep) {}

  void host_has(const ChunkKey& key) { observe(key, false, false, {}); }
  void host_lost(const ChunkKey& key) { observe(key, false, true, {}); }
  void tier_has(const ChunkKey& key, std::string_view tier) { observe(key, true, false, tier); }
  void tier_lost(const ChunkKey& key, std::string_view tier) { observe(key, true, true, tier); }
  std::vector<CacheEvent> take() { return std::exchange(events_, {}); }

 private:
  void observe(const ChunkKey& key, bool storage, bool removed, std::string_view owner) {
    if (!keep_) return;
    if (events_.empty() || events_.back().storage != storage || events_.back().removed != removed ||
        events_.back().owner != owner) {
      events_.push_back({{}, storage, removed, std::string(owner)});
    }
    events_.back().keys.push_back(key);
  }

  const bool keep_;
  std::vector<CacheEvent> events_;
};

}  // namespace kv_offload
