// SPDX-License-Identifier: Apache-2.0
// Shared by the tests of all tier kinds: rows with known bytes, and blocking calls.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/aligned_buffer.h"
#include "tier/tier.h"

namespace kv_offload::testing {

inline ChunkKey key_of(std::uint32_t number, std::uint32_t group = 0) {
  std::string bytes(36, '\0');
  std::uint64_t state = number * 0x9E3779B97F4A7C15ull + 1;
  for (int i = 0; i < 32; ++i) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    bytes[static_cast<std::size_t>(i)] = static_cast<char>(state >> 56);
  }
  for (int i = 0; i < 4; ++i)
    bytes[static_cast<std::size_t>(32 + i)] = static_cast<char>(group >> (8 * (3 - i)));
  return ChunkKey(bytes);
}

using ShardSizes = std::vector<std::uint64_t>;

// A row with one buffer per shard. Padding starts as garbage.
class Row {
 public:
  explicit Row(const ShardSizes& sizes) : sizes_(sizes) {
    for (const std::uint64_t size : sizes) {
      buffers_.emplace_back(std::max<std::size_t>(size, 1));
      std::memset(buffers_.back().data(), 0xA5, buffers_.back().size());
    }
  }
  void fill(std::uint32_t number) {
    for (std::size_t i = 0; i < sizes_.size(); ++i) {
      for (std::uint64_t at = 0; at < sizes_[i]; at += 8) {
        const std::uint64_t word = word_of(number, i, at);
        std::memcpy(buffers_[i].data() + at, &word, std::min<std::uint64_t>(8, sizes_[i] - at));
      }
    }
  }
  bool holds(std::uint32_t number) const {
    for (std::size_t i = 0; i < sizes_.size(); ++i) {
      for (std::uint64_t at = 0; at < sizes_[i]; at += 8) {
        const std::uint64_t word = word_of(number, i, at);
        if (std::memcmp(buffers_[i].data() + at, &word, std::min<std::uint64_t>(8, sizes_[i] - at)) != 0)
          return false;
      }
    }
    return true;
  }
  std::vector<Shard> shards() const {
    std::vector<Shard> shards;
    for (std::size_t i = 0; i < sizes_.size(); ++i) shards.emplace_back(buffers_[i].data(), sizes_[i]);
    return shards;
  }

 private:
  // Each byte has one of four values, so that a codec can compress two pages into one.
  static std::uint64_t word_of(std::uint32_t number, std::size_t shard, std::uint64_t at) {
    return (number * 31 + shard * 7 + 1 + at / 8) * 0x9E3779B97F4A7C15ull & 0x0303030303030303ull;
  }
  ShardSizes sizes_;
  std::vector<AlignedBuffer> buffers_;
};

// A tier with blocking calls. Every wait is for an event and lasts two minutes at most.
class TierDriver {
 public:
  explicit TierDriver(std::unique_ptr<Tier> tier) : tier_(std::move(tier)) {}
  Tier& tier() { return *tier_; }

  OpId start(OpKind kind, std::uint32_t number, const ShardSizes& sizes, Nanos deadline = Nanos{0}) {
    TierOp op;
    op.id = ++last_id_;
    op.kind = kind;
    op.key = key_of(number);
    op.deadline = deadline;
    op.entry_info.tenant = tenant;
    auto row = std::make_unique<Row>(sizes);
    if (kind == OpKind::kWrite) row->fill(content_of(number));
    op.shards = row->shards();
    rows_[op.id] = {number, std::move(row)};
    std::vector<TierOp> ops;
    ops.push_back(std::move(op));
    tier_->submit(std::move(ops));
    return last_id_;
  }
  void poll() {
    std::vector<Completion> completions;
    tier_->poll(&completions, &removals);
    for (Completion& completion : completions) {
      EXPECT_FALSE(done_.contains(completion.id)) << "an op ended twice";
      done_[completion.id] = std::move(completion);
    }
  }
  bool ended(OpId id) {
    poll();
    return done_.contains(id);
  }
  Completion finish(OpId id) {
    EXPECT_TRUE(until([&] { return ended(id); })) << "the op did not end";
    return done_[id];
  }
  Status write(std::uint32_t number, const ShardSizes& sizes = {8192}) {
    return finish(start(OpKind::kWrite, number, sizes)).status;
  }
  // A returned ok also means that the bytes are right.
  Status read(std::uint32_t number, const ShardSizes& sizes = {8192}) {
    const OpId id = start(OpKind::kRead, number, sizes);
    const Status status = finish(id).status;
    EXPECT_TRUE(!status || holds_what_it_should(id)) << "wrong bytes for record " << number;
    return status;
  }
  // For a read that ended ok.
  bool holds_what_it_should(OpId id) const {
    const auto& [number, row] = rows_.at(id);
    return row->holds(content_of(number));
  }
  bool has(std::uint32_t number) {
    Presence presence = Presence::kUnknown;
    bool asked = false;
    until([&] {
      poll();
      const bool idle = tier_->stats().queued_reads == 0;  // before contains(), to see ended lookups
      presence = tier_->contains(key_of(number));
      if (presence == Presence::kAbsent || presence == Presence::kPresent) return true;
      if (presence == Presence::kLookupFailed || (presence == Presence::kStaleMiss && asked)) return true;
      if (presence == Presence::kLookupPending || (asked && !idle)) return false;  // a lookup is pending
      if (presence == Presence::kStaleMiss) tier_->forget_miss(key_of(number));
      tier_->prefetch_presence({key_of(number)}, KeyOrder::kNone);
      asked = true;
      return false;
    });
    return presence == Presence::kPresent;
  }
  void wait_for_scan() {
    EXPECT_TRUE(until([&] {
      poll();
      return tier_->stats().scan_complete;
    })) << "the scan did not end";
  }
  // (Upkeep pauses for twenty times as long as it took.)
  bool until(const std::function<bool()>& condition) {
    const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(120);
    while (!condition()) {
      if (std::chrono::steady_clock::now() > give_up) return false;
      std::this_thread::yield();
    }
    return true;
  }
  std::size_t removed(TierRemoval::Reason reason) {
    poll();
    std::size_t count = 0;
    for (const TierRemoval& removal : removals) count += removal.reason == reason;
    return count;
  }
  std::vector<TierRemoval> removals;
  TenantId tenant = 0;        // of the next ops
  std::uint32_t weights = 0;  // other weights give other bytes under the same key

 private:
  std::uint32_t content_of(std::uint32_t number) const { return number + 1000003 * weights; }
  std::map<OpId, std::pair<std::uint32_t, std::unique_ptr<Row>>> rows_;  // outlives the tier
  std::map<OpId, Completion> done_;
  OpId last_id_ = 0;
  std::unique_ptr<Tier> tier_;
};

}  // namespace kv_offload::testing
