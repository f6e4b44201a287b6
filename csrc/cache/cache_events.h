// SPDX-License-Identifier: Apache-2.0
// CacheEvents: records which chunks host memory and the tiers gained and lost, until the caller takes the
// events. Consecutive changes of the same kind share one event. Records nothing unless `enabled` is set. A
// call that runs out of memory changes nothing.
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
  explicit CacheEvents(bool enabled) : enabled_(enabled) {}

  void host_has(const ChunkKey& key) { append(key, false, false, {}); }
  void host_lost(const ChunkKey& key) { append(key, false, true, {}); }
  void tier_has(const ChunkKey& key, std::string_view tier) { append(key, true, false, tier); }
  void tier_lost(const ChunkKey& key, std::string_view tier) { append(key, true, true, tier); }
  // Takes back the last change: it did not happen.
  void take_back() noexcept {
    if (!enabled_) return;
    events_.back().keys.pop_back();
    if (events_.back().keys.empty()) events_.pop_back();
  }
  std::vector<CacheEvent> take() { return std::exchange(events_, {}); }

 private:
  void append(const ChunkKey& key, bool storage, bool removed, std::string_view owner) {
    if (!enabled_) return;
    if (events_.empty() || events_.back().storage != storage || events_.back().removed != removed ||
        events_.back().owner != owner) {
      events_.push_back({{key}, storage, removed, std::string(owner)});
    } else {
      events_.back().keys.push_back(key);
    }
  }

  const bool enabled_;
  std::vector<CacheEvent> events_;
};

}  // namespace kv_offload
