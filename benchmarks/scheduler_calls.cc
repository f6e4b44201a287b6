// SPDX-License-Identifier: Apache-2.0
// How long can a call block the scheduler's thread? Each command prints one JSON object per sample.
//
//   scheduler_calls rows ROUNDS
//     prepare_store() that evicts: rows of one size and of two sizes, by turns.
//   scheduler_calls end READS
//     end_request() of a request with READS queued reads, after READS of another request; then the longest
//     end_step() until all reads are cancelled, and end_request() of the other request.
//   scheduler_calls index RECORDS
//     The longest hold of the lock of RecordIndex while the index grows, evicts and is reset; contains() at
//     that size.
//
// All times are CPU seconds of the calling thread, so that other processes disturb them little.
// scheduler_calls.py runs these commands several times, for two builds by turns.
#include <fmt/format.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "backends/fs/record_index.h"
#include "bench.h"
#include "cache/tiered_cache.h"
#include "tier/io_pool.h"
#include "tier/record_store.h"
#include "tier/thread_pool_tier.h"

namespace kv_offload::bench {
namespace {

double thread_seconds() {
  timespec time{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) / 1e9;
}
template <typename Call>
double seconds_of(Call&& call) {
  const double before = thread_seconds();
  call();
  return thread_seconds() - before;
}

ChunkKey key_of(std::uint64_t number, std::uint32_t group) {
  std::string bytes(bench::key_of(number).bytes());
  bytes[bytes.size() - 1] = static_cast<char>(group);
  return ChunkKey(bytes);
}

// Of caches and tiers: no request's deadline passes on a busy machine.
const FakeClock standing_clock;

struct Directory {
  std::string path = "/dev/shm/scheduler-calls-XXXXXX";
  Directory() {
    if (::mkdtemp(path.data()) == nullptr) std::abort();
  }
  ~Directory() { std::filesystem::remove_all(path); }
};

// A cache and its one rank. The rows are in a sparse file, and no bytes are copied.
class Host {
 public:
  Host(std::uint64_t bytes, const std::vector<std::uint64_t>& row_bytes,
       std::vector<std::unique_ptr<Tier>> tiers) {
    static int number = 0;
    RegionOptions region;
    region.engine_id = fmt::format("scheduler-calls-{}-{}", ::getpid(), ++number);
    region.bytes = bytes;
    region.shm_directory = directory_.path;
    rank_ = HostRegion::attach_worker(region, 0, {row_bytes, "bench"});
    region_ = HostRegion::attach_scheduler(region);
    CacheOptions options;
    options.eviction_policy = "prefix";
    options.load_policy = LoadPolicy::kAlways;
    options.groups.resize(row_bytes.size());
    for (std::uint32_t group = 0; group < row_bytes.size(); ++group) {
      options.groups[group].group_id = group;
      options.groups[group].shard_bytes[0] = row_bytes[group];
      options.groups[group].tokens_per_chunk = 16;
    }
    cache_ = std::make_unique<TieredCache>(options, region_, std::move(tiers), metrics_, standing_clock);
  }
  TieredCache& cache() { return *cache_; }
  HostRegion& rank() { return *rank_; }

 private:
  Directory directory_;
  Metrics metrics_;
  std::shared_ptr<HostRegion> region_, rank_;
  std::unique_ptr<TieredCache> cache_;
};

// ---- rows

constexpr std::uint64_t kHostBytes = std::uint64_t{12} << 30;
constexpr std::uint32_t kStored = 1024;  // chunks of each of two groups in a call

class Storing {
 public:
  Storing(std::string_view name, std::vector<std::uint64_t> row_bytes)
      : name_(name), host_(kHostBytes, row_bytes, {}) {
    while (!store(nullptr)) {
    }
    for (int i = 0; i < 8; ++i) store(nullptr);  // slabs have changed hands
  }
  // One prompt; true when it evicted.
  bool store(double* seconds) {
    std::vector<ChunkKey> keys;
    std::vector<std::uint32_t> depths;
    for (std::uint32_t group = 0; group < 2; ++group) {
      for (std::uint32_t i = 0; i < kStored; ++i) {
        keys.push_back(key_of(stored_ + i, group));
        depths.push_back(i);
      }
    }
    stored_ += kStored;
    TieredCache& cache = host_.cache();
    const RequestHandle request = cache.begin_request("r", {});
    StoreGrant grant;
    const double took = seconds_of([&] { grant = cache.prepare_store(request, keys, depths); });
    if (grant.accepted.size() != keys.size()) std::abort();
    if (seconds != nullptr) *seconds = took;
    host_.rank().report(0, grant.transfer.ticket, 0);
    cache.complete_store(keys);
    cache.end_request(request);
    cache.end_step();
    return !grant.evicted.empty();
  }
  std::string_view name() const { return name_; }

 private:
  const std::string_view name_;
  Host host_;
  std::uint64_t stored_ = 0;
};

void measure_rows(int rounds) {
  constexpr std::uint64_t kKiB = 1024;
  Storing one("one", {40 * kKiB, 40 * kKiB}), two("two", {32 * kKiB, 48 * kKiB});
  for (int round = 0; round < rounds; ++round) {
    for (Storing* storing : {&one, &two}) {
      double seconds = 0;
      if (!storing->store(&seconds)) std::abort();
      fmt::print("{{\"sizes\": \"{}\", \"seconds\": {:.6f}}}\n", storing->name(), seconds);
    }
  }
}

// ---- end

// Has a record of each key. No thread serves its ops.
class EndlessStore final : public RecordStore, public Catalog {
 public:
  Status write(const TierOp&, const EpochPtr&, std::uint64_t*) override { return Status::ok(); }
  Status read(const TierOp&, const EpochPtr&, std::uint64_t*) override { return Status::ok(); }
  Status locate(std::span<const ChunkKey> keys, KeyOrder, const EpochPtr&,
                std::vector<bool>* present) override {
    present->assign(keys.size(), true);
    return Status::ok();
  }
  std::size_t keys_per_locate(KeyOrder) const override { return 64; }
  void maintain() override {}
  Status begin_epoch() override { return Status::ok(); }
  EpochPtr epoch() const override { return epoch_; }
  void forget(std::uint64_t) override {}
  void close() override {}
  void figures(TierStats*) const override {}
  Catalog* catalog() override { return this; }

  Presence contains(const ChunkKey&) const override { return Presence::kPresent; }
  void begin_lookup(std::span<const ChunkKey>, EpochNumber, std::vector<ChunkKey>*) override {}
  void forget_miss(const ChunkKey&) override {}
  void cancel_lookup(std::span<const ChunkKey>, EpochNumber) override {}
  void touch(const ChunkKey&) override {}
  void take_removals(std::vector<TierRemoval>*) override {}

 private:
  const EpochPtr epoch_ = std::make_shared<Epoch>();
};

// A request that waits for the reads of its whole prompt.
RequestHandle wait_for(TieredCache& cache, std::uint64_t first, std::uint64_t count) {
  const RequestHandle request = cache.begin_request("r", {});
  for (std::uint64_t i = 0; i < count; ++i) {
    if (cache.lookup(request, key_of(first + i, 0)) != LookupResult::kPending) std::abort();
  }
  cache.end_step();
  return request;
}

void measure_end(std::uint64_t reads) {
  IoPool* pool = nullptr;
  ThreadPoolTierOptions options;
  options.name = "fs";
  options.clock = &standing_clock;
  options.op_timeout = std::chrono::hours(1);
  options.manual_pool = &pool;
  std::vector<std::unique_ptr<Tier>> tiers;
  tiers.push_back(make_thread_pool_tier(std::make_unique<EndlessStore>(), options));
  Host host((2 * reads + 1024) * kPageBytes, {kPageBytes}, std::move(tiers));
  TieredCache& cache = host.cache();
  const auto queued = [&] { return cache.tiers()[0]->stats().queued_reads; };
  const RequestHandle first = wait_for(cache, 0, reads);
  const RequestHandle behind = wait_for(cache, std::uint64_t{1} << 32, reads);
  if (queued() != 2 * reads) std::abort();
  const double seconds = seconds_of([&] { cache.end_request(behind); });
  double step = 0;  // the longest one: steps process ended ops, and cancel remaining reads
  do {
    step = std::max(step, seconds_of([&] { cache.end_step(); }));
  } while (queued() != reads);
  const double last = seconds_of([&] { cache.end_request(first); });
  fmt::print(
      "{{\"reads\": {}, \"seconds\": {:.6f}, \"end_step_seconds\": {:.6f}, \"first_seconds\": {:.6f}}}\n",
      reads, seconds, step, last);
}

// ---- index

// The longest hold of any mutex since the last print(). One thread. "undisturbed": of the holds in which the
// kernel did not run another thread in the place of this one, which leaves it with cold caches.
class HoldWatch final : public Mutex::Watcher {
 public:
  HoldWatch() { Mutex::watch(this); }
  ~HoldWatch() override { Mutex::watch(nullptr); }
  void locked(const Mutex&) override {
    if (depth_++ > 0) return;
    ::getrusage(RUSAGE_THREAD, &usage_);
    since_ = thread_seconds();
  }
  void unlocking(const Mutex&) override {
    if (--depth_ > 0) return;
    const double seconds = thread_seconds() - since_;
    ++holds_;
    over_ += seconds > 1e-3;
    if (seconds <= undisturbed_) return;
    rusage usage{};
    ::getrusage(RUSAGE_THREAD, &usage);
    const bool disturbed = usage.ru_nivcsw != usage_.ru_nivcsw;
    if (!disturbed) undisturbed_ = seconds;
    if (seconds <= longest_) return;
    longest_ = seconds;
    faults_ = usage.ru_minflt - usage_.ru_minflt;
  }
  void print(const char* phase, std::uint64_t records) {
    fmt::print(
        "{{\"phase\": \"{}\", \"records\": {}, \"longest_seconds\": {:.9f}, \"longest_page_faults\": {}, "
        "\"undisturbed_seconds\": {:.9f}, \"holds_over_1ms\": {}, \"holds\": {}}}\n",
        phase, records, longest_, faults_, undisturbed_, over_, holds_);
    longest_ = undisturbed_ = 0;
    holds_ = over_ = 0;
  }

 private:
  int depth_ = 0;
  rusage usage_{};
  double since_ = 0, longest_ = 0, undisturbed_ = 0;
  long faults_ = 0;  // of pages, in the longest
  std::uint64_t holds_ = 0, over_ = 0;
};

constexpr std::uint64_t kFileBytes = 8192;

class Index {
 public:
  explicit Index(std::uint64_t count) : count_(count) {
    keys_.reserve(2 * count);
    for (std::uint64_t i = 0; i < 2 * count; ++i) keys_.push_back(bench::key_of(i));
  }
  // Enters the findings of a start: the names on disk, then the order of their use.
  void scan() {
    begin(1);
    std::vector<FoundRecord> found(count_);
    std::vector<RecordIndex::LastUse> order;
    for (std::uint32_t i = 0; i < count_; ++i) {
      found[i].key = keys_[i];
      found[i].file_bytes = found[i].disk_bytes = kFileBytes;
      order.emplace_back(i, i);
    }
    HoldWatch watch;
    records_.adopt_names(epoch_, found, false, go_on_);
    records_.adopt_in_order(epoch_, found, order, true, go_on_);
    watch.print("scan", count_);
  }
  // From `first` on, prompts of 1,024 chunks.
  void write(std::uint64_t first, std::uint64_t count) {
    for (std::uint64_t i = first; i < first + count; ++i) {
      EntryInfo entry_info;
      entry_info.depth = static_cast<std::uint32_t>(i % 1024);
      entry_info.request = static_cast<std::uint32_t>(i / 1024 + 1);
      if (entry_info.depth > 0) entry_info.parent = chunk_id(keys_[i - 1]);
      if (!records_.written({keys_[i], kFileBytes}, entry_info, epoch_)) std::abort();
    }
  }
  void grow() {
    HoldWatch watch;
    write(0, count_);
    watch.print("grow", count_);
  }
  // Each write replaces another record, as in a full directory.
  void evict(std::uint64_t count) {
    HoldWatch watch;
    std::vector<TierRemoval> removals;
    for (std::uint64_t i = 0; i < count; ++i) {
      const auto victim = records_.take_victim();
      if (!victim) std::abort();
      records_.evicted(*victim);
      write(count_ + i, 1);
      if (i % 64 == 0) records_.take_removals(&removals);
    }
    watch.print("evict", count_);
  }
  void contains() {
    constexpr std::size_t kCalls = 200'000;
    for (const bool present : {true, false}) {
      std::size_t found = 0;
      const double seconds = seconds_of([&] {
        for (std::size_t i = 0; i < kCalls; ++i) {
          const std::size_t at = i * 7919 % count_;
          found += records_.contains(keys_[present ? at : count_ + at]) == Presence::kPresent;
        }
      });
      if (found != (present ? kCalls : 0)) std::abort();
      fmt::print("{{\"contains\": {}, \"records\": {}, \"ns\": {:.2f}}}\n", present, count_,
                 seconds / kCalls * 1e9);
    }
  }
  void reset() {
    HoldWatch watch;
    const double call = seconds_of([&] { records_.reset(); });
    begin(2);
    std::vector<TierRemoval> removals;
    double longest_take = 0;
    for (std::size_t before = 1; before != removals.size();) {
      before = removals.size();
      removals.reserve(before + count_);
      longest_take = std::max(longest_take, seconds_of([&] { records_.take_removals(&removals); }));
    }
    if (removals.size() < count_) std::abort();
    records_.free_unused();
    watch.print("reset", count_);
    fmt::print("{{\"call\": \"reset\", \"records\": {}, \"seconds\": {:.9f}}}\n", count_, call);
    fmt::print("{{\"call\": \"take_removals\", \"records\": {}, \"seconds\": {:.9f}}}\n", count_,
               longest_take);
  }
  void begin(std::uint64_t number) {
    epoch_ = std::make_shared<FsEpoch>();
    epoch_->number = number;
    if (!records_.begin(epoch_, *records_.next(), RecordIndex::Extent::kOrder)) std::abort();
  }

 private:
  const std::uint64_t count_;
  std::vector<ChunkKey> keys_;
  FakeClock clock_;
  RecordIndex records_{"prefix", clock_};
  std::shared_ptr<FsEpoch> epoch_;
  const std::atomic<bool> go_on_{false};
};

void measure_index(std::uint64_t records) {
  {
    Index index(records);
    index.scan();
    index.reset();
  }
  Index index(records);
  index.begin(1);
  index.grow();
  index.contains();
  index.evict(records / 4);
  index.reset();
}

}  // namespace
}  // namespace kv_offload::bench

int main(int argc, char** argv) {
  const std::string_view command = argc == 3 ? argv[1] : "";
  const std::uint64_t number = argc == 3 ? std::strtoull(argv[2], nullptr, 10) : 0;
  if (command == "rows") {
    kv_offload::bench::measure_rows(static_cast<int>(number));
  } else if (command == "end") {
    kv_offload::bench::measure_end(number);
  } else if (command == "index") {
    kv_offload::bench::measure_index(number);
  } else {
    fmt::print(stderr, "usage: {} rows ROUNDS | end READS | index RECORDS\n", argv[0]);
    return 2;
  }
}
