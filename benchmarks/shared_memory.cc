// SPDX-License-Identifier: Apache-2.0
// How much time does shared host memory add to the scheduler's thread and to a load? Prints one table.
//
//   shared_memory [ENGINES] [ROUNDS]
//
// Compares an engine without share_host_memory (the baseline) with one of ENGINES that share, in the same run
// by turns, in an order that changes. All engines run in this process. Times are medians of CPU time of the
// calling thread, except for the loads, which also copy the bytes.
#include <fmt/format.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "bench.h"
#include "cache/tiered_cache.h"

namespace kv_offload::bench {
namespace {

constexpr std::uint64_t kRowBytes = 64 << 10;
constexpr std::uint64_t kRows = 8192;  // 512 MiB in each engine
constexpr std::uint32_t kChunks = 4096;

double thread_seconds() {
  timespec time{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) / 1e9;
}

std::vector<ChunkKey> keys_from(std::uint64_t first) {
  std::vector<ChunkKey> keys;
  for (std::uint32_t i = 0; i < kChunks; ++i) keys.push_back(key_of(first + i));
  return keys;
}

class Engine {
 public:
  Engine(const std::string& directory, bool shares, int number) {
    RegionOptions options;
    options.engine_id = fmt::format("shared-memory-{}-{}", ::getpid(), number);
    options.bytes = kRows * kRowBytes;
    options.shm_directory = directory;
    if (shares) options.share_for = "bench";
    worker_ = HostRegion::attach_worker(options, 0, {{kRowBytes}, "bench"});
    region_ = HostRegion::attach_scheduler(options);
    CacheOptions cache;
    GroupGeometry group;
    group.tokens_per_chunk = 256;
    group.shard_bytes[0] = kRowBytes;
    cache.groups = {group};
    cache.full_attention = {true};
    cache.load_policy = LoadPolicy::kAlways;
    if (shares) cache.share_identity = "bench";
    cache.neighbour_interval = std::chrono::milliseconds(100);  // in a thread, as in an engine
    cache_ =
        std::make_unique<TieredCache>(cache, region_, std::vector<std::unique_ptr<Tier>>(), metrics_, clock_);
  }
  void step() {
    clock_.advance(std::chrono::seconds(2));
    cache_->end_step();
    (void)worker_->map_neighbours();
  }
  std::uint64_t neighbours() const { return cache_->stats().neighbours; }

  // Each returns CPU seconds per chunk.
  double store(const std::vector<ChunkKey>& keys) {
    const double before = thread_seconds();
    const RequestHandle request = cache_->begin_request("r", {});
    const StoreGrant grant = cache_->prepare_store(request, keys);
    worker_->report(0, grant.transfer.ticket, 0);
    cache_->complete_store(keys);
    cache_->end_request(request);
    cache_->end_step();
    return (thread_seconds() - before) / kChunks;
  }
  double look_up(const std::vector<ChunkKey>& keys, LookupResult expected) {
    const RequestHandle request = cache_->begin_request("r", {});
    const double before = thread_seconds();
    for (const ChunkKey& key : keys) {
      if (cache_->lookup(request, key) != expected) std::abort();
    }
    const double seconds = (thread_seconds() - before) / kChunks;
    cache_->end_request(request);
    return seconds;
  }
  // CPU seconds of a request for a prompt of which no engine has a chunk: vLLM's scan ends at its first miss.
  double scan_unseen(const std::vector<ChunkKey>& keys) {
    const double before = thread_seconds();
    for (const ChunkKey& key : keys) {
      const RequestHandle request = cache_->begin_request("r", {});
      if (cache_->lookup(request, key) != LookupResult::kMiss) std::abort();
      cache_->end_request(request);
    }
    return (thread_seconds() - before) / kChunks;
  }
  // Seconds of the wall clock for a whole load: lookups, calls and the copy of all bytes to a cache.
  double load(const std::vector<ChunkKey>& keys, std::vector<std::byte>* to) {
    const double before = now();
    const RequestHandle request = cache_->begin_request("r", {});
    for (const ChunkKey& key : keys) {
      if (cache_->lookup(request, key) != LookupResult::kHit) std::abort();
    }
    const RowTransfer transfer = cache_->prepare_load(request, keys);
    cache_->end_step();
    for (std::size_t i = 0; i < transfer.rows.size(); ++i) {
      const Shard row = worker_->shard(0, transfer.rows[i], kRowBytes);
      std::memcpy(to->data() + i * kRowBytes, row.data(), kRowBytes);
    }
    worker_->report(0, transfer.ticket, 0);
    cache_->complete_load(keys);
    cache_->end_request(request);
    cache_->end_step();
    return now() - before;
  }
  void touch() { (void)worker_->prefault(0, 2); }

 private:
  FakeClock clock_;
  Metrics metrics_;
  std::unique_ptr<HostRegion> worker_;
  std::shared_ptr<HostRegion> region_;
  std::unique_ptr<TieredCache> cache_;
};

void print(const char* name, std::vector<double> alone, std::vector<double> shared, double unit,
           const char* unit_name) {
  const double before = median(std::move(alone)), after = median(std::move(shared));
  fmt::print("{:<46} {:>9.1f} {:>9.1f} {:<9} {:.2f}\n", name, before / unit, after / unit, unit_name,
             after / before);
}

void run(int engines, int rounds) {
  std::string directory = "/dev/shm/shared-memory-XXXXXX";
  if (::mkdtemp(directory.data()) == nullptr) std::abort();
  {
    Engine alone(directory, false, 0);
    std::vector<std::unique_ptr<Engine>> shared;
    for (int i = 0; i < engines; ++i) shared.push_back(std::make_unique<Engine>(directory, true, i + 1));
    const auto have_met = [&](const auto& engine) {
      return engine->neighbours() == static_cast<std::uint64_t>(engines) - 1;
    };
    while (!std::ranges::all_of(shared, have_met)) {
      for (auto& engine : shared) engine->step();
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    alone.touch();
    for (auto& engine : shared) engine->touch();
    Engine& own = *shared[0];
    Engine& last = *shared.back();
    std::vector<std::byte> cache(kChunks * kRowBytes);
    std::vector<double> store[2], hit[2], miss[2], scan[2], borrow[2], load[2];
    for (int round = 0; round < rounds; ++round) {
      const std::uint64_t first = static_cast<std::uint64_t>(round) * 10 * kChunks;
      const auto mine = keys_from(first), theirs = keys_from(first + kChunks),
                 absent = keys_from(first + 2 * kChunks);
      last.store(theirs);
      for (int turn = 0; turn < 2; ++turn) {
        const int side = (turn + round) % 2;
        Engine& engine = side == 0 ? alone : own;
        store[side].push_back(engine.store(mine));
        hit[side].push_back(engine.look_up(mine, LookupResult::kHit));
        miss[side].push_back(engine.look_up(absent, LookupResult::kMiss));
        scan[side].push_back(engine.scan_unseen(absent));
      }
      for (int turn = 0; turn < 2; ++turn) {
        const int side = (turn + round) % 2;
        const auto& keys = side == 0 ? mine : theirs;
        borrow[side].push_back(own.look_up(keys, LookupResult::kHit));
        load[side].push_back(own.load(keys, &cache));
      }
    }
    fmt::print("{} engines, {} chunks, rows of {} KiB, {} rounds\n", engines, kChunks, kRowBytes >> 10,
               rounds);
    fmt::print("{:<46} {:>9} {:>9} {:<9} {}\n", "", "baseline", "shared", "", "ratio");
    print("store of new chunks, per chunk", store[0], store[1], 1e-9, "ns");
    print("lookup of own chunks, per chunk", hit[0], hit[1], 1e-9, "ns");
    print("lookup of chunks that no engine has, per chunk", miss[0], miss[1], 1e-9, "ns");
    print("request for an unseen prompt, per request", scan[0], scan[1], 1e-9, "ns");
    print("lookup of a neighbour's chunks vs. own", borrow[0], borrow[1], 1e-9, "ns");
    print("whole load from a neighbour vs. from own memory", load[0], load[1], 1e-3, "ms");
  }
  std::filesystem::remove_all(directory);
}

}  // namespace
}  // namespace kv_offload::bench

int main(int argc, char** argv) {
  kv_offload::bench::run(argc > 1 ? std::atoi(argv[1]) : 4, argc > 2 ? std::atoi(argv[2]) : 15);
}
