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

void RemovalWatch::doubt_all(Time now) {
  all_ = {true, false, settled_from(now)};
  listing_.outdated = true;
}

void RemovalWatch::doubt(const ChunkKey& key, Time now) {
  if (doubtful_.size() >= kMostKeys) return doubt_all(now);
  doubtful_.push_back(key);
}

void RemovalWatch::wait(const ChunkKey& key, Time now) {
  if (waiting_.size() >= kMostKeys) return doubt_all(now);
  waiting_.push_back({settled_from(now), key});
}

// Moves present keys that changed to doubtful_.
void RemovalWatch::collect(PresenceCache& known, const std::string& prefix,
                           const std::atomic<bool>& stopped) {
  const bool lost = !std::exchange(queued_, false);
  const RemovalNotices::Changes changes = notices_.take(stopped);
  const Time now = std::chrono::steady_clock::now();
  const auto is_present = [&](const ChunkKey& key) { return known.contains(key) == Presence::kPresent; };
  if (changes.all || lost) doubt_all(now);
  for (; !waiting_.empty() && is_over(waiting_.front().until, now); waiting_.pop_front()) {
    if (is_present(waiting_.front().key)) doubt(waiting_.front().key, now);
  }
  for (const std::string& name : changes.keys) {
    const std::optional<ChunkKey> key = key_in(name, prefix);
    if (!key) continue;
    if (is_present(*key)) {
      doubt(*key, now);
    } else {
      wait(*key, now);
    }
  }
  queued_ = true;
  list(known, now);
}

// Continues or begins a listing of all present keys.
void RemovalWatch::list(PresenceCache& known, Time now) {
  const bool is_settled = is_over(all_.settled, now);
  if (!listing_.active && all_.due && (!all_.listed || is_settled)) listing_ = {true, is_settled, false, 0};
  if (!listing_.active || doubtful_.size() >= kKeysPerRun) return;
  if (known.list_present(&listing_.next, kKeysPerRun, &doubtful_)) return;
  listing_.active = false;
  if (listing_.outdated) return;
  all_.listed = true;
  all_.due = !listing_.settled;
}

void RemovalWatch::check(PresenceCache& known, const std::string& prefix, Deadline until) {
  const auto size = std::min(doubtful_.size(), kKeysPerRun);
  const Time begun = std::chrono::steady_clock::now();
  if (size == 0 || begun < ask_again_) return;
  std::vector<std::string> names;
  for (std::size_t i = 0; i < size; ++i) names.push_back(prefix + doubtful_[i].hex());
  std::vector<Reply> replies;
  std::vector<bool> answered;
  const Nanos asked = known.now();
  const bool any = cluster_.at_each(names, "EXISTS", until, &replies, &answered).is_ok();
  const Time now = std::chrono::steady_clock::now();
  if (!any) {  // the keys stay doubtful; other upkeep has its turn
    ask_again_ = now + std::max<Nanos>(now - begun, RemovalNotices::kRetryAfter);
    return;
  }
  for (std::size_t i = 0; i < size; ++i) {
    const bool is_known = answered[i] && replies[i].kind == Reply::Kind::kInteger;
    const bool exists = is_known && replies[i].integer != 0;
    if (exists || (is_known && known.vanished(doubtful_[i], asked, epoch_number_))) continue;
    wait(doubtful_[i], now);
  }
  doubtful_.erase(doubtful_.begin(), doubtful_.begin() + static_cast<std::ptrdiff_t>(size));
}

void RemovalWatch::run(PresenceCache& known, PresenceCache::EpochNumber epoch_number,
                       const std::string& prefix, Deadline until, const std::atomic<bool>& stopped) {
  if (std::exchange(epoch_number_, epoch_number) != epoch_number) {
    doubtful_.clear();
    waiting_.clear();
  }
  ++runs_;
  collect(known, prefix, stopped);
  if (!stopped) check(known, prefix, until);
}

}  // namespace kv_offload::redis
