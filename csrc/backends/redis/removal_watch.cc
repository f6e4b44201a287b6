// SPDX-License-Identifier: Apache-2.0
#include "backends/redis/removal_watch.h"

#include <algorithm>
#include <optional>
#include <string_view>
#include <utility>

namespace kv_offload::redis {
namespace {

std::optional<ChunkKey> key_in(std::string_view name, std::string_view prefix) {
  if (!name.starts_with(prefix)) return std::nullopt;
  try {
    return ChunkKey::from_hex(name.substr(prefix.size()));
  } catch (const InvalidArgument&) {
    return std::nullopt;  // another program's key
  }
}

}  // namespace

void RemovalWatch::wait(const ChunkKey& key, Time now) {
  if (waiting_.size() < kMostWaiting) {
    waiting_.push_back({now + kSettled, runs_ + kSettledRuns, key});
  } else {
    listing_ = true;
    next_listed_ = 0;
  }
}

// Moves present keys that changed to doubtful_.
void RemovalWatch::collect(PresenceCache& known, const std::string& prefix) {
  const RemovalNotices::Changes changes = notices_.take();
  const Time now = std::chrono::steady_clock::now();
  const auto is_present = [&](const ChunkKey& key) { return known.contains(key) == Presence::kPresent; };
  if (changes.all) {
    listing_ = true;
    next_listed_ = 0;
  }
  const auto is_settled = [&](const Waiting& one) { return one.until <= now && one.until_run <= runs_; };
  for (; !waiting_.empty() && is_settled(waiting_.front()); waiting_.pop_front()) {
    if (is_present(waiting_.front().key)) doubtful_.push_back(waiting_.front().key);
  }
  for (const std::string& name : changes.keys) {
    const std::optional<ChunkKey> key = key_in(name, prefix);
    if (!key) continue;
    if (is_present(*key)) {
      doubtful_.push_back(*key);
    } else {
      wait(*key, now);
    }
  }
  if (listing_ && doubtful_.size() < kKeysPerRun)
    listing_ = known.list_present(&next_listed_, kKeysPerRun, &doubtful_);
}

void RemovalWatch::check(PresenceCache& known, const std::string& prefix) {
  const auto size = std::min(doubtful_.size(), kKeysPerRun);
  if (size == 0) return;
  std::vector<std::string> names;
  for (std::size_t i = 0; i < size; ++i) names.push_back(prefix + doubtful_[i].hex());
  const Time now = std::chrono::steady_clock::now();
  std::vector<Reply> replies;
  std::vector<bool> answered;
  const Nanos asked = known.now();
  // If no node responds, the keys stay doubtful.
  if (!cluster_.at_each(names, "EXISTS", now + RemovalNotices::kAnswerWithin, &replies, &answered)) return;
  for (std::size_t i = 0; i < size; ++i) {
    const bool is_known = answered[i] && replies[i].kind == Reply::Kind::kInteger;
    const bool exists = is_known && replies[i].integer != 0;
    if (exists || (is_known && known.vanished(doubtful_[i], asked, epoch_number_))) continue;
    wait(doubtful_[i], now);
  }
  doubtful_.erase(doubtful_.begin(), doubtful_.begin() + static_cast<std::ptrdiff_t>(size));
}

void RemovalWatch::run(PresenceCache& known, PresenceCache::EpochNumber epoch_number,
                       const std::string& prefix) {
  if (std::exchange(epoch_number_, epoch_number) != epoch_number) {
    doubtful_.clear();
    waiting_.clear();
  }
  ++runs_;
  collect(known, prefix);
  check(known, prefix);
}

}  // namespace kv_offload::redis
