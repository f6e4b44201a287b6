// SPDX-License-Identifier: Apache-2.0
// Do the calls of the cache take the same time with a million chunks as with four
// thousand? Nanoseconds per key of lookup (a prompt's prefix, and in random order),
// prepare_store, complete_store, prepare_load and complete_load, with 4,096 keys per
// call, medians. One JSON object per line.
//
//   cache_bench [kept] [prefix|lru] [RESIDENT_CHUNKS ...]        default: prefix 4096 1000000
//
// `kept`: with keep_host_memory, so a table of the resident chunks is updated too.
// The rows are 4 KiB of a sparse region, and no bytes are copied.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <random>
#include <string>
#include <vector>

#include "bench.h"
#include "cache/tiered_cache.h"

namespace kv_offload {
namespace {

using bench::key_of;
using bench::now;

constexpr std::size_t kCall = 4096;  // keys per call: 64k tokens in chunks of 16
constexpr int kRounds = 31;

class Bench {
 public:
  Bench(std::size_t resident, const std::string& policy, bool kept) : resident_(resident) {
    RegionOptions options;
    options.engine_id = fmt::format("cache-bench-{}", ::getpid());
    options.bytes = (resident + 2 * kCall) * kPageBytes;
    options.shm_directory = directory_.path;
    CacheOptions cache;
    if (kept) cache.keep_identity = options.keep_for = "cache_bench";
    rank_ = HostRegion::attach_worker(options, 0, {{kPageBytes}, "bench"});
    region_ = HostRegion::attach_scheduler(options);
    cache.eviction_policy = policy;
    cache.groups.resize(1);
    cache.groups[0].shard_bytes[0] = kPageBytes;
    cache.groups[0].tokens_per_chunk = 16;
    cache_ =
        std::make_unique<TieredCache>(cache, region_, std::vector<std::unique_ptr<Tier>>{}, metrics_, clock_);
    while (keys_.size() < resident) store(nullptr, nullptr);
  }

  void run() {
    measure("lookup, a prefix", [&](std::size_t) { return look(prompt()); });
    measure("lookup, random order", [&](std::size_t) {
      std::vector<ChunkKey> keys(kCall);
      for (ChunkKey& key : keys) key = keys_[random_() % keys_.size()];
      return look(keys);
    });
    measure("lookup, absent", [&](std::size_t round) {
      std::vector<ChunkKey> keys(kCall);
      for (std::size_t i = 0; i < kCall; ++i) keys[i] = key_of((std::uint64_t{1} << 40) + round * kCall + i);
      return look(keys);
    });
    std::vector<double> prepare_load, complete_load, prepare_store, complete_store;
    for (int round = 0; round < kRounds; ++round) {
      const auto keys = prompt();
      const RequestHandle request = cache_->begin_request("r", {});
      look(keys, request);
      double at = now();
      const RowTransfer transfer = cache_->prepare_load(request, keys);
      prepare_load.push_back(now() - at);
      rank_->report(0, transfer.ticket, 0);
      at = now();
      cache_->complete_load(keys);
      complete_load.push_back(now() - at);
      cache_->end_request(request);
      cache_->end_step();
    }
    for (int round = 0; round < kRounds; ++round) {
      prepare_store.emplace_back();
      complete_store.emplace_back();
      store(&prepare_store.back(), &complete_store.back());  // evicts, from the third round on
    }
    print("prepare_load", prepare_load);
    print("complete_load", complete_load);
    print("prepare_store, evicting", prepare_store);
    print("complete_store", complete_store);
  }

 private:
  struct Directory {
    std::string path = "/dev/shm/cache-bench-XXXXXX";
    Directory() {
      if (::mkdtemp(path.data()) == nullptr) std::abort();
    }
    ~Directory() { std::filesystem::remove_all(path); }
  };
  // The keys of one store call: a prompt of 4,096 chunks, or all chunks if there are fewer.
  std::vector<ChunkKey> prompt() {
    const std::size_t calls = std::max<std::size_t>(1, resident_ / kCall);
    const std::size_t from = random_() % calls * kCall;
    return {keys_.begin() + static_cast<long>(from),
            keys_.begin() + static_cast<long>(std::min(from + kCall, keys_.size()))};
  }
  void store(double* prepare_seconds, double* complete_seconds) {
    std::vector<ChunkKey> keys;
    std::vector<std::uint32_t> depths;
    for (std::uint32_t i = 0; i < kCall; ++i) {
      keys.push_back(key_of(keys_.size() + i));
      depths.push_back(i);
    }
    const RequestHandle request = cache_->begin_request("r", {});
    double at = now();
    const StoreGrant grant = cache_->prepare_store(request, keys, depths);
    if (prepare_seconds != nullptr) *prepare_seconds = now() - at;
    if (grant.accepted.size() != kCall) std::abort();
    rank_->report(0, grant.transfer.ticket, 0);
    at = now();
    cache_->complete_store(keys);
    if (complete_seconds != nullptr) *complete_seconds = now() - at;
    keys_.insert(keys_.end(), keys.begin(), keys.end());
    cache_->end_request(request);
    cache_->end_step();
  }
  double look(const std::vector<ChunkKey>& keys, std::optional<RequestHandle> given = {}) {
    const RequestHandle request = given ? *given : cache_->begin_request("r", {});
    std::size_t hits = 0;
    const double at = now();
    for (const ChunkKey& key : keys) hits += cache_->lookup(request, key) == LookupResult::kHit;
    const double seconds = now() - at;
    sink_ += hits;
    if (!given) {
      cache_->end_request(request);
      cache_->end_step();
    }
    return seconds;
  }
  template <typename Round>
  void measure(const char* name, Round round) {
    std::vector<double> seconds;
    for (int i = 0; i < kRounds; ++i) seconds.push_back(round(static_cast<std::size_t>(i)));
    print(name, seconds);
  }
  void print(const char* name, std::vector<double> seconds) {
    std::sort(seconds.begin(), seconds.end());
    fmt::print(
        "{{\"verb\": \"{}\", \"resident\": {}, \"keys\": {}, \"median_ns_per_key\": {:.1f}, "
        "\"least_ns_per_key\": {:.1f}, \"median_ms\": {:.3f}}}\n",
        name, resident_, kCall, seconds[seconds.size() / 2] / kCall * 1e9, seconds.front() / kCall * 1e9,
        seconds[seconds.size() / 2] * 1e3);
    std::fflush(stdout);
  }

  Directory directory_;
  std::size_t resident_;
  std::size_t sink_ = 0;
  std::mt19937_64 random_{1};
  Metrics metrics_;
  SteadyClock clock_;
  std::shared_ptr<HostRegion> region_, rank_;
  std::unique_ptr<TieredCache> cache_;
  std::vector<ChunkKey> keys_;
};

}  // namespace
}  // namespace kv_offload

int main(int argc, char** argv) {
  std::vector<std::size_t> sizes;
  std::string policy = "prefix";
  bool kept = false;
  for (int i = 1; i < argc; ++i) {
    if (std::isdigit(static_cast<unsigned char>(*argv[i])) != 0) {
      sizes.push_back(std::strtoull(argv[i], nullptr, 10));
    } else if (std::string_view(argv[i]) == "kept") {
      kept = true;
    } else {
      policy = argv[i];
    }
  }
  if (sizes.empty()) sizes = {4096, 1'000'000};
  for (const std::size_t size : sizes) kv_offload::Bench(size, policy, kept).run();
  return 0;
}
