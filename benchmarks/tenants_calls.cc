// SPDX-License-Identifier: Apache-2.0
// How much time do tenants add to the scheduler's thread? Prints one table.
//
//   tenants_calls [TENANTS] [ROUNDS]
//
// Compares a cache without tenants (the baseline) with one of TENANTS tenants with equal shares, in the same
// run by turns and in an order that changes. Host memory is full, so each store evicts as many chunks. The
// first tenant stores half of all chunks, so it is above its share, and stores evict its chunks. Lookups that
// hit, and loads, are for chunks that another tenant stored. Times are medians of CPU time of the calling
// thread.
#include <stdlib.h>
#include <unistd.h>

#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cache_calls.h"

namespace kv_offload::bench {
namespace {

constexpr std::uint64_t kRowBytes = 4 << 10;
constexpr std::uint32_t kRows = 65536;
constexpr std::uint32_t kChunks = 4096;

class Engine {
 public:
  Engine(const std::string& directory, std::uint32_t tenants) : tenants_(tenants) {
    RegionOptions options;
    options.engine_id = fmt::format("tenants-calls-{}-{}", ::getpid(), tenants);
    options.bytes = kRows * kRowBytes;
    options.shm_directory = directory;
    worker_ = HostRegion::attach_worker(options, 0, {{kRowBytes}, "bench"});
    region_ = HostRegion::attach_scheduler(options);
    CacheOptions cache;
    GroupGeometry group;
    group.tokens_per_chunk = 256;
    group.shard_bytes[0] = kRowBytes;
    cache.groups = {group};
    cache.full_attention = {true};
    cache.load_policy = LoadPolicy::kAlways;
    cache.eviction_policy = "prefix";
    for (std::uint32_t i = 0; i < tenants; ++i)
      cache.tenants.push_back({fmt::format("tenant{}", i), 1.0 / tenants});
    cache_ =
        std::make_unique<TieredCache>(cache, region_, std::vector<std::unique_ptr<Tier>>(), metrics_, clock_);
  }
  ~Engine() { cache_->close(); }

  void set_round(std::uint32_t round) {
    if (tenants_ == 0) return;
    options_.tenant = static_cast<TenantId>(round % 2 == 0 ? 0 : 1 + round / 2 % (tenants_ - 1));
  }
  // Each returns CPU seconds per chunk.
  double store(const std::vector<ChunkKey>& keys) {
    const double before = thread_seconds();
    const RequestHandle request = cache_->begin_request("r", options_);
    const StoreGrant grant = cache_->prepare_store(request, keys);
    if (grant.accepted.size() != keys.size()) std::abort();
    worker_->report(0, grant.transfer.ticket, 0);
    cache_->complete_store(keys);
    cache_->end_request(request);
    cache_->end_step();
    return (thread_seconds() - before) / static_cast<double>(keys.size());
  }
  double look_up(const std::vector<ChunkKey>& keys, LookupResult expected) {
    return bench::look_up(*cache_, options_, keys, expected);
  }
  double load(const std::vector<ChunkKey>& keys) {
    const RequestHandle request = cache_->begin_request("r", options_);
    for (const ChunkKey& key : keys) {
      if (cache_->lookup(request, key) != LookupResult::kHit) std::abort();
    }
    const double before = thread_seconds();
    const RowTransfer transfer = cache_->prepare_load(request, keys);
    worker_->report(0, transfer.ticket, 0);
    cache_->complete_load(keys);
    cache_->end_request(request);
    cache_->end_step();
    return (thread_seconds() - before) / static_cast<double>(keys.size());
  }

 private:
  const std::uint32_t tenants_;
  RequestOptions options_;
  FakeClock clock_;
  Metrics metrics_;
  std::unique_ptr<HostRegion> worker_;
  std::shared_ptr<HostRegion> region_;
  std::unique_ptr<TieredCache> cache_;
};

void run(std::uint32_t tenants, int rounds) {
  std::string directory = "/dev/shm/tenants-calls-XXXXXX";
  if (::mkdtemp(directory.data()) == nullptr) std::abort();
  {
    Engine without(directory, 0), with(directory, tenants);
    Engine* const engines[2] = {&without, &with};
    std::vector<double> store[2], hit[2], miss[2], load[2];
    const int full =
        static_cast<int>(kRows / kChunks) + static_cast<int>(tenants);  // rounds until all is full
    std::vector<ChunkKey> keys, earlier;  // of the previous round, and so of another tenant
    for (int round = 0; round < full + rounds; ++round) {
      const std::uint64_t first = static_cast<std::uint64_t>(round) * 2 * kChunks;
      earlier = std::exchange(keys, keys_from(first, kChunks));
      const auto absent = keys_from(first + kChunks, kChunks);
      for (int turn = 0; turn < 2; ++turn) {
        const int side = (turn + round) % 2;
        Engine& engine = *engines[side];
        engine.set_round(static_cast<std::uint32_t>(round));
        const double stored = engine.store(keys);
        if (round < full) continue;
        store[side].push_back(stored);
        hit[side].push_back(engine.look_up(earlier, LookupResult::kHit));
        miss[side].push_back(engine.look_up(absent, LookupResult::kMiss));
        load[side].push_back(engine.load(earlier));
      }
    }
    fmt::print("{} tenants, {} chunks, {} rounds\n", tenants, kChunks, rounds);
    fmt::print("{:<52} {:>9} {:>9} {:<9} {}\n", "", "without", "with", "", "ratio");
    print_line("store of new chunks, per chunk", store[0], store[1], 1e-9, "ns");
    print_line("lookup of held chunks, per chunk", hit[0], hit[1], 1e-9, "ns");
    print_line("lookup of absent chunks, per chunk", miss[0], miss[1], 1e-9, "ns");
    print_line("prepare and complete a load, per chunk", load[0], load[1], 1e-9, "ns");
  }
  std::filesystem::remove_all(directory);
}

}  // namespace
}  // namespace kv_offload::bench

int main(int argc, char** argv) {
  const int tenants = argc > 1 ? std::atoi(argv[1]) : 4;
  if (tenants < 2 || tenants > 8) {
    fmt::print(stderr, "tenants_calls: {} tenants were given; 2 to 8 are possible\n", argv[1]);
    return 2;
  }
  kv_offload::bench::run(static_cast<std::uint32_t>(tenants), argc > 2 ? std::atoi(argv[2]) : 31);
}
