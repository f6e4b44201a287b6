// SPDX-License-Identifier: Apache-2.0
// Fixtures that build the cache component by component, for the unit tests of each header.
// They use a region with real rows, ranks that report when the test calls report(), a fake
// tier and a manual clock. Each fixture adds one layer to the previous one.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "cache/cache_fixture.h"
#include "cache/cost_model.h"
#include "cache/device_loads.h"
#include "cache/host_chunks.h"
#include "cache/key_history.h"
#include "cache/request_table.h"
#include "cache/row_provider.h"
#include "cache/store_path.h"
#include "cache/tickets.h"
#include "cache/tier_io.h"
#include "cache/write_back.h"
#include "memory/neighbour_region.h"

namespace kv_offload {

struct PartsOptions {
  std::uint64_t rows = 4;                       // rows of 4 KiB in the single area
  std::vector<std::uint64_t> shard_bytes{300};  // per group
  CacheOptions cache{};                         // groups are filled in
  std::uint32_t shards_per_area = 1;
  std::uint32_t workers = 1;  // of a replicated cache: all of them load, the first one stores
  std::size_t tiers = 1;      // or 2
  std::string share_for{};    // see RegionOptions
  bool spans_hosts = false;   // rank 1 runs on another host
};

// Rows and chunks.
struct ChunkParts {
  static constexpr std::uint32_t kTokens = 16;

  explicit ChunkParts(PartsOptions parts = {})
      : directory(make_directory()),
        options(with_groups(parts)),
        region(attach(parts, &rank)),
        groups(options, 1),
        tickets(*region),
        events(true),
        chunks(groups, *region, tickets, events, "lru", options.tenants) {}
  ~ChunkParts() { std::filesystem::remove_all(directory); }
  ChunkParts(const ChunkParts&) = delete;
  ChunkParts& operator=(const ChunkParts&) = delete;

  // ---- verbs
  Slot filling(const std::string& name, Ticket ticket, std::uint32_t group = 0) {
    return chunks.insert_filling(key_of(name, group), group, take(group), {}, ticket);
  }
  Slot fetching(const std::string& name, std::uint32_t group = 0) {
    return chunks.insert_fetching(key_of(name, group), group, take(group), {});
  }
  Slot resident(const std::string& name, std::uint32_t group = 0) {
    const Slot slot = filling(name, kNoTicket, group);
    chunks.finish_store(slot);
    return slot;
  }
  Slot fetched(const std::string& name, std::uint8_t tier = 0) {
    const Slot slot = fetching(name);
    chunks.finish_fetch(slot, tier);
    return slot;
  }
  RowId take(std::uint32_t group) {
    const RowId row = chunks.allocate(group);
    EXPECT_NE(row, kNoRow) << "the test's region is full";
    return row;
  }
  bool has(const std::string& name, std::uint32_t group = 0) {
    return chunks.find(key_of(name, group)) != nullptr;
  }
  std::size_t free_rows() {
    std::vector<RowId> taken;
    for (RowId row = chunks.allocate(0); row != kNoRow; row = chunks.allocate(0)) taken.push_back(row);
    for (const RowId row : taken) chunks.free(row);
    return taken.size();
  }
  void report(Ticket ticket, std::uint64_t failed_groups = 0) { rank->report(0, ticket, failed_groups); }
  // The report of rank 1 arrives from its host.
  void report_from_afar(Ticket ticket, std::uint64_t failed_groups = 0) {
    region->report(1, ticket, failed_groups);
  }

  static std::string make_directory() {
    std::string pattern = "/dev/shm/cache-parts-XXXXXX";
    return ::mkdtemp(pattern.data());
  }
  static CacheOptions with_groups(const PartsOptions& parts) {
    CacheOptions options = parts.cache;
    for (std::uint32_t g = 0; g < parts.shard_bytes.size(); ++g) {
      GroupGeometry group;
      group.group_id = g;
      group.tokens_per_chunk = kTokens;
      group.shard_bytes[0] = parts.shard_bytes[g];
      group.shards_per_area = parts.shards_per_area;
      options.groups.push_back(group);
    }
    return options;
  }
  std::shared_ptr<HostRegion> attach(const PartsOptions& parts, std::unique_ptr<HostRegion>* worker) const {
    RegionOptions made;
    made.engine_id = "parts";
    made.num_workers = parts.workers;
    made.bytes = parts.rows * kPageBytes;
    made.shm_directory = directory;
    made.share_for = parts.share_for;
    if (parts.spans_hosts) {
      made.num_workers = made.num_areas = 2;
      made.local_ranks = 1;
      made.bytes *= 2;
    }
    std::shared_ptr<HostRegion> scheduler = HostRegion::attach_scheduler(made);
    *worker = HostRegion::attach_worker(made, 0, {parts.shard_bytes, "test"});
    return scheduler;
  }

  const std::string directory;
  const CacheOptions options;
  std::unique_ptr<HostRegion> rank;
  const std::shared_ptr<HostRegion> region;
  const ChunkGroups groups;
  Tickets tickets;
  CacheEvents events;
  HostChunks chunks;
};

// Another engine of the host. `parts` calls share_in() with the identity "weights".
struct OtherEngine {
  OtherEngine(const ChunkParts& parts, const std::string& engine_id) : options(parts.region->options()) {
    options.engine_id = engine_id;
    std::uint64_t smallest = parts.region->area_bytes();
    for (const std::uint64_t bytes : parts.groups.row_bytes()) {
      smallest = std::min(smallest, round_up(bytes, kPageBytes));
      identity += fmt::format(" {}", round_up(bytes, kPageBytes));
    }
    layout = SharedRowsLayout::of(parts.region->area_bytes(), smallest);
  }
  RegionOptions options;
  SharedRowsLayout layout;
  std::string identity = "weights";
  std::unique_ptr<HostRegion> worker, region;
};

// It reads rows of `owner`. REQUIRES: the owner shares its rows.
struct ReadingEngine : OtherEngine {
  explicit ReadingEngine(const ChunkParts& owner) : OtherEngine(owner, "reader") {
    region = HostRegion::attach_scheduler(options);
    std::string problem;
    rows = NeighbourRegion::attach(*region, 0, layout, identity, &problem);
    EXPECT_NE(rows, nullptr) << problem;
  }
  // Returns the row.
  RowId pin(const std::string& name, std::uint32_t group = 0) const {
    const auto found = rows->find(key_of(name, group));
    EXPECT_TRUE(found && rows->pin(*found)) << name;
    return found ? found->row : kNoRow;
  }

  std::unique_ptr<NeighbourRegion> rows;
};

// It lends rows, which `reader` finds when it shares its own later.
struct LendingEngine : OtherEngine {
  explicit LendingEngine(const ChunkParts& reader) : OtherEngine(reader, "owner") {
    worker = HostRegion::attach_worker(options, 0, {{kPageBytes}, "test"});
    region = HostRegion::attach_scheduler(options);
    rows.emplace(region->memory_of_shared_rows(layout.bytes), layout, identity);
    region->share();
  }
  void lend(const std::string& name) { rows->publish(next++, key_of(name), 0, 0); }

  std::optional<SharedRows> rows;
  RowId next = 0;
};

// Adds tier operations.
struct OpParts : ChunkParts {
  explicit OpParts(const PartsOptions& parts = {})
      : ChunkParts(parts),
        key_history(64),
        costs(parts.tiers),
        ops(
            {groups, chunks, key_history, costs, events, metrics, clock}, region, make_tiers(parts.tiers),
            [this](TierIo::Waiter waiter, const TierIo::ReadEnd& end) {
              if (on_read_end) on_read_end(waiter, end);
            },
            [this](Slot slot, std::uint8_t from) {
              if (on_fetched) on_fetched(slot, from);
            }) {}

  // Puts a record of this chunk on the tier.
  void record(const std::string& name) {
    FakeTier::Record& made = tier->records[key_of(name)];
    made.shards = {std::vector<std::byte>(groups[0].geometry.shard_bytes[0])};
  }
  // Completes all ops of the tier and polls the completions.
  void finish() {
    tier->finish();
    ops.poll();
  }

  FakeClock clock;
  Metrics metrics;
  FakeTier* tier = nullptr;
  FakeTier* slower = nullptr;  // null unless PartsOptions::tiers is 2
  KeyHistory key_history;
  CostModel costs;
  TierIo::OnReadEnd on_read_end;
  TierIo::OnFetched on_fetched;
  TierIo ops;

 private:
  std::vector<std::unique_ptr<Tier>> make_tiers(std::size_t count) {
    std::vector<std::unique_ptr<Tier>> tiers;
    for (std::size_t i = 0; i < count; ++i) {
      auto made = std::make_unique<FakeTier>(i == 0 ? "fs" : "slower", &clock);
      (i == 0 ? tier : slower) = made.get();
      tiers.push_back(std::move(made));
    }
    return tiers;
  }
};

// Adds write-back and row allocation.
struct SupplyParts : OpParts {
  explicit SupplyParts(PartsOptions parts = {})
      : OpParts(std::move(parts)),
        write_back(groups, chunks, key_history, ops, metrics, options.tiers),
        row_provider(groups, chunks, key_history, ops, write_back, metrics) {}

  WriteBack write_back;
  RowProvider row_provider;
};

// Adds the loads to the device.
struct LoadParts : SupplyParts {
  explicit LoadParts(PartsOptions parts = {})
      : SupplyParts(std::move(parts)),
        device_loads({groups, chunks, write_back, tickets, costs, metrics, clock}, options) {}

  DeviceLoads device_loads;
};

// Adds requests.
struct RequestParts : LoadParts {
  explicit RequestParts(PartsOptions parts = {})
      : LoadParts(std::move(parts)),
        requests({groups, chunks, key_history, tickets, costs, ops, device_loads, metrics, clock}, options) {
    on_read_end = [this](TierIo::Waiter waiter, const TierIo::ReadEnd& end) {
      requests.read_ended(waiter, end);
    };
  }
  LookupResult lookup(RequestHandle request, const std::string& name) {
    return requests.lookup(request, key_of(name));
  }
  double missed(std::string_view reason) const {
    return metrics.value("kv_offload_miss_tokens_total", {reason});
  }

  RequestTable requests;
};

}  // namespace kv_offload
