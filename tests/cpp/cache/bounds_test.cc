// SPDX-License-Identifier: Apache-2.0
// Memory bounds: any mix of groups fills host memory to the last percent, and memory use does not
// grow with the number of served requests.
#include <gtest/gtest.h>
#include <malloc.h>

#include <filesystem>
#include <fstream>

#include "cache/cache_fixture.h"
#include "test_iterations.h"

namespace kv_offload {
namespace {

using testing::kSanitized;  // the bookkeeping of sanitizers grows

// ---- capacity

struct Model {
  const char* name;
  std::vector<std::uint64_t> shard_bytes;
  std::vector<bool> full_attention;
  std::vector<int> weights;  // chunks of each group that are stored together
};
void PrintTo(const Model& model, std::ostream* out) { *out << model.name; }

constexpr std::uint64_t kKiB = 1024;

class CapacityOf : public ::testing::TestWithParam<Model> {};

TEST_P(CapacityOf, host_memory_holds_the_tokens_that_its_bytes_allow) {
  const Model& model = GetParam();
  World world({.ranks = 2,
               .rows = (std::uint64_t{256} << 20) / kPageBytes,
               .shard_bytes = model.shard_bytes,
               .tier = false,
               .cache = {.full_attention = model.full_attention}});
  std::vector<std::uint64_t> held(model.shard_bytes.size(), 0);
  std::uint64_t declined = 0;
  const std::uint64_t capacity = world.cache->stats().capacity_bytes;
  std::uint64_t offered = 0;
  for (int number = 0; offered < 4 * capacity; ++number) {
    const RequestHandle request = world.cache->begin_request("r", {});
    std::vector<ChunkKey> keys;
    for (std::uint32_t group = 0; group < held.size(); ++group) {
      for (int i = 0; i < model.weights[group]; ++i) {
        keys.push_back(key_of(fmt::format("k{}-{}", number, i), group));
        offered += 2 * model.shard_bytes[group];
      }
    }
    const StoreGrant grant = world.cache->prepare_store(request, keys);
    if (!grant.accepted.empty()) world.report(grant.transfer.ticket);
    world.cache->complete_store(keys);
    world.cache->end_request(request);
    world.cache->end_step();
    declined += keys.size() - grant.accepted.size();
    for (const std::uint32_t i : grant.accepted) ++held[keys[i].group_id()];
    for (const ChunkKey& key : grant.evicted) --held[key.group_id()];
  }
  std::uint64_t bytes = 0;
  for (std::size_t group = 0; group < held.size(); ++group)
    bytes += held[group] * 2 * model.shard_bytes[group];
  EXPECT_GE(static_cast<double>(bytes), 0.97 * static_cast<double>(capacity));
  EXPECT_EQ(declined, 0u);
  RecordProperty("held", fmt::format("{:.4f}", static_cast<double>(bytes) / static_cast<double>(capacity)));
}

// Control: all groups use rows of the largest size, as if one chunk size served all groups.
TEST(Capacity, the_test_detects_rows_of_one_size_for_all_groups) {
  const std::vector<std::uint64_t> ideal{1040 * kKiB, 64 * kKiB};
  World world({.ranks = 1,
               .rows = (std::uint64_t{64} << 20) / kPageBytes,
               .shard_bytes = {ideal[0], ideal[0]},
               .tier = false});
  std::uint64_t bytes = 0;
  for (int number = 0;; ++number) {
    const std::vector<ChunkKey> keys{key_of(fmt::format("k{}", number), 0),
                                     key_of(fmt::format("k{}", number), 1)};
    const RequestHandle request = world.cache->begin_request("r", {});
    const StoreGrant grant = world.cache->prepare_store(request, keys);
    if (!grant.evicted.empty()) break;
    for (const std::uint32_t i : grant.accepted) bytes += ideal[keys[i].group_id()];
    world.report(grant.transfer.ticket);
    world.cache->complete_store(keys);
    world.cache->end_request(request);
  }
  EXPECT_LT(bytes, (std::uint64_t{64} << 20) * 6 / 10);
}

INSTANTIATE_TEST_SUITE_P(
    Models, CapacityOf,
    ::testing::Values(
        Model{"one_group", {640 * kKiB}, {true}, {1}},
        Model{"gemma_like", {256 * kKiB, 256 * kKiB, 128 * kKiB}, {true, false, false}, {4, 1, 1}},
        Model{"mamba_like", {64 * kKiB, 1040 * kKiB}, {true, false}, {8, 1}}),
    [](const auto& instance) { return std::string(instance.param.name); });

// ---- growth

std::uint64_t resident_bytes() {  // anonymous memory of this process, without shared memory
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("RssAnon:")) return std::stoull(line.substr(8)) * 1024;
  }
  return 0;
}
std::uint64_t allocated_bytes() { return ::mallinfo2().uordblks + ::mallinfo2().hblkhd; }  // to the byte
std::size_t entries_of(const char* directory) {
  return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator(directory), {}));
}

class Growth {
 public:
  Growth() : world_({.rows = 512, .cache = {.keep_events = true}}) {
    world_.tier->automatic = true;
    world_.tier->max_records = 64;
  }
  // Runs one request: lookup, load or store, end.
  void serve(std::uint64_t number) {
    TieredCache& cache = *world_.cache;
    const RequestHandle request = cache.begin_request(fmt::format("request-{}", number), {});
    const std::uint64_t prefix = number % 3 == 0 ? number : number % 1500;
    std::vector<ChunkKey> hits, missing;
    bool pending = false;
    for (int i = 0; i < 3; ++i) {
      const ChunkKey key = key_of(fmt::format("{}.{}", prefix, i));
      const LookupResult result = cache.lookup(request, key);
      pending |= result == LookupResult::kPending || result == LookupResult::kRetry;
      (result == LookupResult::kHit && missing.empty() ? hits : missing).push_back(key);
    }
    if (!pending && !hits.empty()) {
      const RowTransfer transfer = cache.prepare_load(request, hits);
      world_.report(transfer.ticket);
      cache.complete_load(hits);
    }
    const StoreGrant grant = cache.prepare_store(request, missing);
    if (!grant.accepted.empty()) world_.report(grant.transfer.ticket);
    cache.complete_store(missing);
    if (number % 7 == 0) cache.end_step();
    cache.end_request(request);
    cache.end_step();
    cache.take_events();
    world_.clock.advance(std::chrono::milliseconds(1));
    cache.publish_gauges();
    world_.metrics.drain();
    if (leaks)
      leaked_.push_back(fmt::format("what is kept of request {}, longer than a small string", number));
  }
  bool leaks = false;

  World& world() { return world_; }

 private:
  World world_;
  std::vector<std::string> leaked_;
};

// A million with KV_OFFLOAD_SOAK=8.
constexpr std::uint64_t kWarm = kSanitized ? 2000 : 20000;
const std::uint64_t kRequests = kWarm + static_cast<std::uint64_t>(testing::rounds(120000));
const std::uint64_t kMostGrowth = 2 * (kRequests - kWarm);  // two bytes a request
constexpr std::uint64_t kMostResident = std::uint64_t{2}
                                        << 20;  // includes memory that malloc does not report

TEST(Growth, a_hundred_thousand_requests_leak_no_memory) {
  Growth growth;
  std::uint64_t number = 0;
  while (number < kWarm) growth.serve(number++);
  ::malloc_trim(0);
  const std::uint64_t before = resident_bytes(), allocated = allocated_bytes();
  const std::size_t files = entries_of("/proc/self/fd"), threads = entries_of("/proc/self/task");
  while (number < kRequests) growth.serve(number++);
  ::malloc_trim(0);
  if (!kSanitized) {
    EXPECT_LE(resident_bytes(), before + kMostResident);
    EXPECT_LE(allocated_bytes(), allocated + kMostGrowth);
  }
  RecordProperty("grown", static_cast<int>(allocated_bytes() - allocated));
  EXPECT_EQ(entries_of("/proc/self/fd"), files);
  EXPECT_EQ(entries_of("/proc/self/task"), threads);
  const TieredCache::Stats stats = growth.world().cache->stats();
  EXPECT_EQ(stats.requests + stats.waiting_requests + stats.quarantined_rows, 0u);
}

TEST(Growth, the_test_detects_a_leak_of_a_hundred_bytes_per_request) {
  if (kSanitized) GTEST_SKIP() << "memory is not measured under a sanitizer";
  Growth growth;
  growth.leaks = true;
  std::uint64_t number = 0;
  while (number < kWarm / 10) growth.serve(number++);
  ::malloc_trim(0);  // otherwise memory freed by earlier tests is reused first
  const std::uint64_t before = resident_bytes(), allocated = allocated_bytes();
  while (number < kWarm) growth.serve(number++);
  EXPECT_GT(resident_bytes(), before + (std::uint64_t{1} << 20));
  EXPECT_GT(allocated_bytes(), allocated + 50 * kWarm);
}

// Measures index, policy and allocator of a cache that holds a million chunks.
TEST(Growth, a_chunk_in_host_memory_costs_less_than_256_bytes_of_bookkeeping) {
  if (kSanitized) GTEST_SKIP() << "memory is not measured under a sanitizer";
  constexpr std::uint64_t kChunks = 1 << 20;
  const std::uint64_t before = allocated_bytes();
  World world({.ranks = 1, .rows = kChunks, .tier = false});
  std::vector<ChunkKey> keys;
  for (std::uint64_t number = 0; number < kChunks; number += 1024) {
    keys.clear();
    for (std::uint64_t i = 0; i < 1024; ++i) keys.push_back(key_of(fmt::format("k{}", number + i)));
    const RequestHandle request = world.cache->begin_request("r", {});
    const StoreGrant grant = world.cache->prepare_store(request, keys);
    world.report(grant.transfer.ticket);
    world.cache->complete_store(keys);
    world.cache->end_request(request);
  }
  EXPECT_EQ(world.cache->stats().resident_chunks, kChunks);
  const std::uint64_t used = allocated_bytes() - before;
  RecordProperty("bytes_per_chunk", static_cast<int>(used / kChunks));
  EXPECT_LT(used / kChunks, 256u);
}

}  // namespace
}  // namespace kv_offload
