// SPDX-License-Identifier: Apache-2.0
// A TieredCache whose whole environment the test controls: a region with real rows, ranks that
// copy on demand, a tier (fake, or the real store on a directory) whose ops end on demand, and
// a manual clock. Chunks have names; the last digit-free word is the group's.
#pragma once

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cache/fake_tier.h"
#include "cache/stepped_store.h"
#include "cache/tiered_cache.h"

namespace kv_offload {

using Names = std::vector<std::string>;

inline ChunkKey key_of(std::string_view name, std::uint32_t group_id = 0) {
  std::string bytes = fmt::format("{:-<16}", name);
  for (int shift = 24; shift >= 0; shift -= 8) bytes.push_back(static_cast<char>(group_id >> shift));
  return ChunkKey(bytes);
}

// The bytes that a rank computes for a chunk: its key and place, repeated.
// `weights`: other model weights give other bytes for the same key.
inline std::byte pattern(const ChunkKey& key, std::uint32_t area, std::size_t offset, std::uint64_t weights) {
  const std::string_view bytes = key.bytes();
  return static_cast<std::byte>(static_cast<unsigned char>(bytes[offset % bytes.size()]) + 31 * area +
                                7 * (offset / bytes.size()) + 101 * weights);
}
inline void fill(Shard shard, const ChunkKey& key, std::uint32_t area, std::uint64_t weights = 0) {
  for (std::size_t i = 0; i < shard.size(); ++i) shard[i] = pattern(key, area, i, weights);
}
inline bool matches(std::span<const std::byte> shard, const ChunkKey& key, std::uint32_t area,
                    std::uint64_t weights = 0) {
  for (std::size_t i = 0; i < shard.size(); ++i) {
    if (shard[i] != pattern(key, area, i, weights)) return false;
  }
  return true;
}

enum class TierKind { kFake, kStore };

struct WorldOptions {
  std::uint32_t ranks = 2;
  std::uint64_t rows = 8;                       // of 4 KiB in each area
  std::vector<std::uint64_t> shard_bytes{300};  // per group
  bool tier = true;
  TierKind tier_kind = TierKind::kFake;
  CacheOptions cache{};  // groups are filled in
  std::string engine_id = "engine";
  std::string shm_directory{};  // empty: a new directory
  std::string keep_for{};       // see RegionOptions; cache.keep_identity enables it
  std::string share_for{};      // see RegionOptions; cache.share_identity enables it
  FakeTier** slower = nullptr;  // if set, receives a second tier below the first
  // Replaces the tier that the test drives.
  std::function<std::unique_ptr<Tier>(const Clock&)> make_tier{};
};

// One cache and its environment.
class World {
 public:
  static constexpr std::uint32_t kTokens = 16;

  explicit World(WorldOptions world_options = {}) : options_(std::move(world_options)) {
    std::string pattern = "/dev/shm/cache-test-XXXXXX";
    directory_ = options_.shm_directory.empty() ? ::mkdtemp(pattern.data()) : options_.shm_directory;
    RegionOptions region_options;
    region_options.engine_id = options_.engine_id;
    region_options.bytes = options_.rows * kPageBytes * options_.ranks;
    region_options.num_areas = options_.ranks;
    region_options.num_workers = options_.ranks;
    region_options.shm_directory = directory_;
    region_options.keep_for = options_.keep_for;
    region_options.share_for = options_.share_for;
    for (std::uint32_t rank = 0; rank < options_.ranks; ++rank) {
      ranks.push_back(HostRegion::attach_worker(region_options, rank, {options_.shard_bytes, "test"}));
    }
    region = HostRegion::attach_scheduler(region_options);
    for (std::uint32_t g = 0; g < options_.shard_bytes.size(); ++g) {
      GroupGeometry group;
      group.group_id = g;
      group.tokens_per_chunk = kTokens;
      for (std::uint32_t rank = 0; rank < options_.ranks; ++rank) {
        group.shard_bytes[rank] = options_.shard_bytes[g];
      }
      options_.cache.groups.push_back(group);
    }
    open();
  }
  ~World() {
    hand = tier = nullptr;
    cache.reset();
    ranks.clear();
    region.reset();
    if (options_.shm_directory.empty()) std::filesystem::remove_all(directory_);
  }

  void open(std::map<ChunkKey, FakeTier::Record> records = {}) {
    std::vector<std::unique_ptr<Tier>> tiers;
    if (options_.make_tier) {
      tiers.push_back(options_.make_tier(clock));
    } else if (options_.tier && options_.tier_kind == TierKind::kStore) {
      if (!disk_) disk_ = std::make_unique<Disk>();
      auto made = std::make_unique<SteppedStore>(*disk_, clock);
      hand = made.get();
      tiers.push_back(std::move(made));
    } else if (options_.tier) {
      auto made = std::make_unique<FakeTier>("fs", &clock);
      hand = tier = made.get();
      tier->records = std::move(records);
      tiers.push_back(std::move(made));
    }
    if (options_.slower != nullptr) {
      auto made = std::make_unique<FakeTier>("slow", &clock);
      *options_.slower = made.get();
      tiers.push_back(std::move(made));
    }
    cache = std::make_unique<TieredCache>(options_.cache, region, std::move(tiers), metrics, clock);
  }
  // Restarts the process; records stay on the tier.
  void restart() {
    cache->close();
    std::map<ChunkKey, FakeTier::Record> records;
    if (tier != nullptr && !tier->was_reset()) records = tier->records;
    cache.reset();
    open(std::move(records));
  }

  // ---- the ranks
  void copy(const ChunkKey& key, RowId row, std::uint32_t group, std::uint64_t weights = 0) {
    for (std::uint32_t area = 0; area < options_.ranks; ++area) {
      fill(ranks[area]->shard(area, row, options_.shard_bytes[group]), key, area, weights);
    }
  }
  bool holds(const ChunkKey& key, RowId row, std::uint32_t group, std::uint64_t weights = 0) const {
    for (std::uint32_t area = 0; area < options_.ranks; ++area) {
      const Shard shard = ranks[area]->shard(area, row, options_.shard_bytes[group]);
      if (!matches(shard, key, area, weights)) return false;
    }
    return true;
  }
  void report(Ticket ticket, std::uint64_t failed_groups = 0) {
    for (std::uint32_t rank = 0; rank < options_.ranks; ++rank)
      ranks[rank]->report(rank, ticket, failed_groups);
  }

  double miss_tokens(std::string_view reason) const {
    return metrics.value("kv_offload_miss_tokens_total", {reason});
  }
  double hit_tokens(std::string_view tier_name) const {
    return metrics.value("kv_offload_hit_tokens_total", {tier_name});
  }
  double failures(std::string_view tier_name, std::string_view op, std::string_view kind) const {
    return metrics.value("kv_offload_failures_total", {tier_name, op, kind});
  }
  double dropped(std::string_view tier_name, std::string_view reason) const {
    return metrics.value("kv_offload_dropped_bytes_total", {tier_name, reason});
  }

  const WorldOptions& options() const { return options_; }

  FakeClock clock;
  Metrics metrics;
  std::shared_ptr<HostRegion> region;
  std::vector<std::unique_ptr<HostRegion>> ranks;
  std::unique_ptr<TieredCache> cache;
  ManualTier* hand = nullptr;  // the tier of either kind
  FakeTier* tier = nullptr;    // the tier if it is a fake one, else null

 private:
  WorldOptions options_;
  std::unique_ptr<Disk> disk_;  // used by the store, must outlive it
  std::string directory_;
};

// Test actions on a world with one group.
class CacheTest : public ::testing::Test {
 protected:
  struct Job {
    std::vector<ChunkKey> keys;
    RowTransfer transfer;
  };

  // A test that needs another world must create it before any other call.
  void make(WorldOptions options) {
    world_.reset();
    options.tier_kind = tier_kind_;
    world_ = std::make_unique<World>(std::move(options));
  }
  World& world() {
    if (!world_) make({});
    return *world_;
  }
  TieredCache& cache() { return *world().cache; }
  ManualTier& tier() { return *world().hand; }
  // REQUIRES: the test runs on the fake tier.
  FakeTier& fake() { return *world().tier; }

  RequestHandle begin(const RequestOptions& options = {}) { return cache().begin_request("r", options); }
  void end(RequestHandle request) { cache().end_request(request); }
  void step() { cache().end_step(); }
  void pass_time(Nanos by) { world().clock.advance(by); }

  static std::vector<ChunkKey> keys(const Names& names, std::uint32_t group = 0) {
    std::vector<ChunkKey> result;
    for (const auto& name : names) result.push_back(key_of(name, group));
    return result;
  }
  static Names names(const std::vector<ChunkKey>& keys) {
    Names result;
    for (const ChunkKey& key : keys) {
      std::string name(key.bytes().substr(0, 16));
      result.push_back(name.substr(0, name.find('-')));
    }
    return result;
  }

  // ---- storing, in halves and whole
  Job offer(RequestHandle request, const Names& offered) {
    const auto all = keys(offered);
    const StoreGrant grant = cache().prepare_store(request, all);
    Job job;
    for (const std::uint32_t i : grant.accepted) job.keys.push_back(all[i]);
    job.transfer = grant.transfer;
    EXPECT_EQ(job.keys.size(), job.transfer.rows.size());
    return job;
  }
  void copy(const Job& job, std::uint64_t failed_groups = 0) {
    for (std::size_t i = 0; i < job.keys.size(); ++i) world().copy(job.keys[i], job.transfer.rows[i], 0);
    if (job.transfer.ticket != kNoTicket) world().report(job.transfer.ticket, failed_groups);
  }
  void complete(const Job& job, bool success = true) { cache().complete_store(job.keys, success); }
  // Names that were accepted.
  Names store(RequestHandle request, const Names& offered) {
    const Job job = offer(request, offered);
    copy(job);
    complete(job);
    return names(job.keys);
  }
  Names store(const Names& offered) {
    const RequestHandle request = begin();
    const Names accepted = store(request, offered);
    end(request);
    return accepted;
  }
  // Stores chunks, writes them to the tier and evicts them from host memory.
  void record(const Names& recorded) {
    store(recorded);
    tier().finish();
    world().restart();
  }

  // ---- looking up, as vLLM scans a full-attention group
  LookupResult lookup(RequestHandle request, const std::string& name) {
    return cache().lookup(request, key_of(name));
  }
  // One letter per lookup: H, P, R, M; ends at the first miss.
  std::string scan(RequestHandle request, const Names& wanted) {
    std::string seen;
    for (const auto& name : wanted) {
      seen.push_back("MHPR"[static_cast<int>(lookup(request, name))]);
      if (seen.back() == 'M') break;
    }
    return seen;
  }
  // Looks up with a new request that does not wait.
  std::string peek(const Names& wanted) {
    const RequestHandle request = begin();
    const std::string seen = scan(request, wanted);
    end(request);
    return seen;
  }

  // ---- loading
  Job begin_load(RequestHandle request, const Names& wanted) {
    Job job;
    job.keys = keys(wanted);
    job.transfer = cache().prepare_load(request, job.keys);
    for (std::size_t i = 0; i < job.keys.size(); ++i) {
      EXPECT_TRUE(world().holds(job.keys[i], job.transfer.rows[i], 0)) << "wrong bytes of " << wanted[i];
    }
    return job;
  }
  void end_load(const Job& job) {
    world().report(job.transfer.ticket);
    cache().complete_load(job.keys);
  }
  void load(RequestHandle request, const Names& wanted) { end_load(begin_load(request, wanted)); }

  TierKind tier_kind_ = TierKind::kFake;
  std::unique_ptr<World> world_;
};

// Base of tests that run on the fake tier and on the real store.
template <typename Fixture>
class OverBoth : public Fixture, public ::testing::WithParamInterface<TierKind> {
 protected:
  OverBoth() { this->tier_kind_ = GetParam(); }
};
#define KV_OFFLOAD_OVER_BOTH(Fixture)                                                                  \
  INSTANTIATE_TEST_SUITE_P(Tiers, Fixture, ::testing::Values(TierKind::kFake, TierKind::kStore),       \
                           [](const auto& instance) {                                                  \
                             return std::string(instance.param == TierKind::kFake ? "Fake" : "Store"); \
                           })

}  // namespace kv_offload
