// SPDX-License-Identifier: Apache-2.0
// Measures how much ranks on several hosts add to the scheduler's calls and to loads. Prints one table.
//
//   hosts_calls [HOSTS] [ROUNDS] [DELAY_US]
//
// Compares an engine with HOSTS ranks on one host (the baseline) with one whose HOSTS ranks are on a host
// each, in the same run by turns, in an order that changes. All hosts are in this process, and each has its
// own region, and with tiers its own directory in /dev/shm. A relay between each other host and the
// scheduler counts the bytes, and delays what it reads for the scheduler by DELAY_US. Times are medians, of
// CPU time of the calling thread for calls and of the wall clock for loads and results. A result is what a
// rank reports.
#include <fmt/format.h>
#include <poll.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "backends/fs/tier.h"
#include "cache_calls.h"
#include "hosts/frame.h"
#include "hosts/host_agent.h"
#include "hosts/host_links.h"
#include "hosts/open_tiers.h"
#include "hosts/sockets.h"

namespace kv_offload::bench {
namespace {

constexpr std::uint32_t kChunks = 4096;         // of a call
constexpr std::uint64_t kSmallShard = 4 << 10;  // bytes of a chunk in one rank, where only calls are measured
constexpr std::uint32_t kPromptTokens = 8192;   // of a load
constexpr std::uint32_t kChunkTokens = 256;     // tokens of a chunk
constexpr std::uint64_t kTokenBytes = 32 << 10;  // KV cache of a token in all ranks, where loads are measured
constexpr std::uint64_t kTierBytes = std::uint64_t{3} << 29;  // of one engine on all hosts: six prompts
constexpr double kPatienceSeconds = 60;
constexpr const char* kVersion = "benchmark";

[[noreturn]] void fail(const std::string& message) {
  fmt::print(stderr, "hosts_calls: {}\n", message);
  std::exit(1);
}

// Forwards one connection of the scheduler to a host's agent, and counts the bytes in both directions.
class Relay {
 public:
  Relay(HostEndpoint target, std::chrono::microseconds delay)
      : target_(std::move(target)),
        delay_(delay),
        listener_(listen_on("127.0.0.1", &port_)),
        thread_([this] { run(); }) {}
  ~Relay() {
    stopping_ = true;
    wake_.signal();
    thread_.join();
  }
  std::string endpoint() const { return to_text({"127.0.0.1", port_, target_.secret}); }
  std::uint64_t bytes() const { return bytes_; }

 private:
  void run() {
    Descriptor scheduler, host;
    while (!stopping_) {
      std::vector<pollfd> watched{{wake_.get(), POLLIN, 0}, {listener_.get(), POLLIN, 0}};
      if (host.is_open()) {
        watched.push_back({scheduler.get(), POLLIN, 0});
        watched.push_back({host.get(), POLLIN, 0});
      }
      (void)::poll(watched.data(), watched.size(), -1);
      bool failed = false;
      if (watched[1].revents != 0) scheduler = accept_on(listener_, &failed);
      if (watched[1].revents != 0 && scheduler.is_open()) {
        int error = 0;
        host = start_connect(target_.address, target_.port, &error);
        pollfd connected{host.get(), POLLOUT, 0};
        (void)::poll(&connected, 1, -1);
      }
      if (!host.is_open()) continue;
      if (!forward(scheduler, host, {}) || !forward(host, scheduler, delay_)) {
        scheduler.reset();
        host.reset();
      }
    }
  }
  bool forward(const Descriptor& from, const Descriptor& to, std::chrono::microseconds delay) {
    std::vector<std::uint8_t> data;
    int error = 0;
    const bool is_open = receive(from, 64 << 10, &data, &error);
    bytes_ += data.size();
    if (!data.empty()) std::this_thread::sleep_for(delay);
    while (!data.empty()) {
      if (!send_some(to, &data)) return false;
    }
    return is_open;
  }

  const HostEndpoint target_;
  const std::chrono::microseconds delay_;
  std::uint16_t port_ = 0;
  const Descriptor listener_;
  const WakeUp wake_;
  std::atomic<bool> stopping_{false};
  std::atomic<std::uint64_t> bytes_{0};
  std::thread thread_;
};

class Engine {
 public:
  Engine(const std::string& directory, std::uint32_t ranks, bool on_hosts, std::uint64_t shard_bytes,
         std::uint32_t rows, std::chrono::microseconds delay, bool has_tier = false)
      : ranks_(ranks), shard_bytes_(shard_bytes), turn_(ranks + 1) {
    static int number = 0;
    RegionOptions options;
    options.bytes = rows * shard_bytes * ranks;
    options.num_areas = options.num_workers = ranks;
    options.shm_directory = directory;
    const std::string id = fmt::format("hosts-calls-{}-{}", ::getpid(), number++);
    for (std::uint32_t rank = 0; rank < ranks; ++rank) {
      options.engine_id = on_hosts && rank > 0 ? fmt::format("{} host {}", id, rank) : id;
      options.first_rank = on_hosts ? rank : 0;
      options.local_ranks = on_hosts ? 1 : 0;
      workers_.push_back(HostRegion::attach_worker(options, rank, {{shard_bytes}, "bench"}));
      (void)workers_.back()->prefault(rank, 2);
    }
    options.engine_id = id;
    options.first_rank = 0;
    region_ = HostRegion::attach_scheduler(options);
    if (on_hosts) connect(delay);
    if (!region_->wait_for_ranks(std::chrono::seconds(60)).is_ok()) std::abort();
    CacheOptions cache;
    GroupGeometry group;
    group.tokens_per_chunk = kChunkTokens;
    std::fill_n(group.shard_bytes.begin(), ranks, shard_bytes);
    cache.groups = {group};
    cache.full_attention = {true};
    cache.load_policy = LoadPolicy::kAlways;
    Tiers tiers;
    if (has_tier) tiers = open_tiers(directory + "/" + id, on_hosts);
    cache_ = std::make_unique<TieredCache>(cache, region_, std::move(tiers), metrics_, clock_);
    for (std::uint32_t rank = 0; rank < ranks; ++rank) threads_.emplace_back([this, rank] { copy_as(rank); });
  }
  ~Engine() {
    job_ = nullptr;
    turn_.arrive_and_wait();
    for (std::thread& thread : threads_) thread.join();
    cache_->close();
    links_.reset();
    for (const auto& agent : agents_) agent->close();
    for (std::thread& opener : openers_) opener.join();
    agents_.clear();
    relays_.clear();
  }

  // Each returns CPU seconds per chunk.
  double store(const std::vector<ChunkKey>& keys, double* until_result = nullptr) {
    double before = thread_seconds();
    const RequestHandle request = cache_->begin_request("r", {});
    const StoreGrant grant = cache_->prepare_store(request, keys);
    double seconds = thread_seconds() - before;
    run(grant.transfer, false);
    before = thread_seconds();
    cache_->complete_store(keys);  // vLLM calls it after all ranks have reported to their executor
    cache_->end_request(request);
    cache_->end_step();
    seconds += thread_seconds() - before;
    wait_for(grant.transfer.ticket, TicketKind::kStore);
    if (until_result != nullptr) *until_result = now() - last_report_;
    before = thread_seconds();
    cache_->end_step();
    if (grant.transfer.rows.size() != keys.size()) fail("host memory had no room for a chunk");
    stored_bytes_ += static_cast<double>(keys.size() * shard_bytes_ * ranks_);
    return (seconds + thread_seconds() - before) / static_cast<double>(keys.size());
  }
  double look_up(const std::vector<ChunkKey>& keys, LookupResult expected) {
    return bench::look_up(*cache_, {}, keys, expected);
  }
  // *wall: seconds of the wall clock, for the lookups, the calls, the copies of all ranks and their results.
  double load(const std::vector<ChunkKey>& keys, double* wall) {
    const double begin = now();
    double before = thread_seconds();
    const RequestHandle request = cache_->begin_request("r", {});
    // Loads from tiers take several steps.
    const auto is_hit = [&](const ChunkKey& key) {
      const LookupResult result = cache_->lookup(request, key);
      if (result == LookupResult::kMiss) {
        cache_->end_request(request);
        cache_->publish_gauges();
        fail("a stored chunk is a miss: " + metrics_.text());
      }
      return result == LookupResult::kHit;
    };
    while (std::count_if(keys.begin(), keys.end(), is_hit) < static_cast<std::ptrdiff_t>(keys.size()))
      cache_->end_step();
    before = thread_seconds();
    const RowTransfer transfer = cache_->prepare_load(request, keys);
    double seconds = thread_seconds() - before;
    run(transfer, true);
    before = thread_seconds();
    cache_->complete_load(keys);
    cache_->end_request(request);
    cache_->end_step();
    seconds += thread_seconds() - before;
    wait_for(transfer.ticket, TicketKind::kLoad);
    *wall = now() - begin;
    before = thread_seconds();
    cache_->end_step();  // releases the rows if the last result came late
    seconds += thread_seconds() - before;
    return seconds / static_cast<double>(keys.size());
  }
  // Waits until the tier has all chunks that were stored.
  void wait_for_writes() {
    const double begin = now();
    while (metrics_.value("kv_offload_write_bytes_total", {"fs"}) < stored_bytes_) {
      if (now() - begin > kPatienceSeconds) fail("the tier has not stored all chunks");
      cache_->end_step();
    }
  }
  std::uint64_t relayed_bytes() const {
    std::uint64_t sum = 0;
    for (const auto& relay : relays_) sum += relay->bytes();
    return sum;
  }

 private:
  void connect(std::chrono::microseconds delay) {
    std::vector<RemoteHost> hosts;
    for (std::uint32_t rank = 1; rank < ranks_; ++rank) {
      HostAgent::Options made;
      made.address = "127.0.0.1";
      made.version = kVersion;
      agents_.push_back(std::make_unique<HostAgent>(workers_[rank], made));
      relays_.push_back(std::make_unique<Relay>(*parse_endpoint(agents_.back()->endpoint()), delay));
      workers_[0]->set_endpoint(rank, relays_.back()->endpoint());
      hosts.push_back({rank, 1});
    }
    HostLinks::Options made;
    made.version = kVersion;
    links_ = std::make_unique<HostLinks>(region_, hosts, made);
    const Status status = links_->wait_until_connected(std::chrono::seconds(60));
    if (!status.is_ok()) {
      fmt::print(stderr, "{}\n", status.to_string());
      std::abort();
    }
  }
  std::unique_ptr<Tier> open_fs(const std::string& root, std::uint64_t bytes, EpochChoice epoch = {}) const {
    FsTierOptions options;
    options.root_dir = root;
    options.max_bytes = bytes;
    options.epoch = epoch;
    return make_fs_tier(options);
  }
  // One directory, or one for each host.
  Tiers open_tiers(const std::string& root, bool on_hosts) {
    Tiers own;
    if (!on_hosts) {
      own.push_back(open_fs(root, kTierBytes));
      return own;
    }
    const std::uint64_t bytes = kTierBytes / ranks_;
    for (std::uint32_t host = 1; host < ranks_; ++host) {
      openers_.emplace_back([this, root, bytes, host, &tiers = agents_[host - 1]->tiers()] {
        while (!tiers.is_closed()) {
          const auto request = tiers.wait_for_request(std::chrono::minutes(1));
          if (!request) continue;
          tiers.close_tiers();
          Tiers opened;
          opened.push_back(open_fs(fmt::format("{} host {}", root, host), bytes, request->epochs.at(0)));
          tiers.open(request->round, std::move(opened));
        }
      });
    }
    OpenOptions options;
    options.timeout = std::chrono::minutes(1);
    return open_on_all_hosts(
        *links_, *region_, 1,
        [&](const std::vector<EpochChoice>& epochs) {
          Tiers opened;
          opened.push_back(open_fs(root, bytes, epochs.at(0)));
          return opened;
        },
        "benchmark", options);
  }
  // All ranks copy the rows, to or from their caches, and report.
  void run(const RowTransfer& transfer, bool is_load) {
    job_ = &transfer;
    is_load_ = is_load;
    turn_.arrive_and_wait();
    turn_.arrive_and_wait();
  }
  void copy_as(std::uint32_t rank) {
    std::vector<std::byte> cache;
    while (true) {
      turn_.arrive_and_wait();
      if (job_ == nullptr) return;
      if (shard_bytes_ > kSmallShard) {  // else only calls are measured
        cache.resize(job_->rows.size() * shard_bytes_);
        for (std::size_t i = 0; i < job_->rows.size(); ++i) {
          const Shard row = workers_[rank]->shard(rank, job_->rows[i], shard_bytes_);
          std::byte* own = cache.data() + i * shard_bytes_;
          if (is_load_)
            std::memcpy(own, row.data(), shard_bytes_);
          else
            std::memcpy(row.data(), own, shard_bytes_);
        }
      }
      store_max(last_report_, now());
      workers_[rank]->report(rank, job_->ticket, 0);
      turn_.arrive_and_wait();
    }
  }
  static void store_max(std::atomic<double>& of, double value) {
    double known = of.load();
    while (known < value && !of.compare_exchange_weak(known, value)) {
    }
  }
  void wait_for(Ticket ticket, TicketKind kind) {
    std::uint64_t failed = 0;
    while (region_->result(ticket, &failed, kind) == TicketResult::kPending) std::this_thread::yield();
    if (failed != 0) std::abort();
  }

  const std::uint32_t ranks_;
  const std::uint64_t shard_bytes_;
  const SteadyClock clock_;
  Metrics metrics_;
  std::vector<std::shared_ptr<HostRegion>> workers_;
  std::shared_ptr<HostRegion> region_;
  std::vector<std::unique_ptr<HostAgent>> agents_;
  std::vector<std::unique_ptr<Relay>> relays_;
  std::unique_ptr<HostLinks> links_;
  std::vector<std::thread> openers_;  // of the tiers of the other hosts
  std::unique_ptr<TieredCache> cache_;
  std::barrier<> turn_;  // begin and end of a job
  const RowTransfer* job_ = nullptr;
  std::atomic<double> last_report_{0};  // when the last rank began to report
  bool is_load_ = false;
  double stored_bytes_ = 0;
  std::vector<std::thread> threads_;
};

void run(std::uint32_t hosts, int rounds, std::chrono::microseconds delay) {
  std::string directory = "/dev/shm/hosts-calls-XXXXXX";
  if (::mkdtemp(directory.data()) == nullptr) std::abort();
  fmt::print("{} hosts of one rank, {} rounds, messages delayed by {} us\n", hosts, rounds, delay.count());
  fmt::print("{:<52} {:>9} {:>9} {:<9} {}\n", "", "one host", "several", "", "ratio");
  {
    Engine one(directory, hosts, false, kSmallShard, 2 * kChunks, delay);
    Engine several(directory, hosts, true, kSmallShard, 2 * kChunks, delay);
    std::vector<double> store[2], hit[2], miss[2], load[2], result[2];
    for (int round = 0; round < rounds; ++round) {
      const std::uint64_t first = static_cast<std::uint64_t>(round) * 2 * kChunks;
      const auto keys = keys_from(first, kChunks), absent = keys_from(first + kChunks, kChunks - 1);
      for (int turn = 0; turn < 2; ++turn) {
        const int side = (turn + round) % 2;
        Engine* engine = side == 0 ? &one : &several;
        double wall = 0;
        store[side].push_back(engine->store(keys));
        hit[side].push_back(engine->look_up(keys, LookupResult::kHit));
        miss[side].push_back(engine->look_up(absent, LookupResult::kMiss));
        load[side].push_back(engine->load(keys, &wall));
        double until_result = 0;
        engine->store({key_of(first + 2 * kChunks - 1)}, &until_result);
        result[side].push_back(until_result);
      }
    }
    print_line("store of new chunks, per chunk", store[0], store[1], 1e-9, "ns");
    print_line("lookup of held chunks, per chunk", hit[0], hit[1], 1e-9, "ns");
    print_line("lookup of absent chunks, per chunk", miss[0], miss[1], 1e-9, "ns");
    print_line("prepare and complete a load, per chunk", load[0], load[1], 1e-9, "ns");
    print_line("result of a store of one chunk known after", result[0], result[1], 1e-6, "us");
  }
  {
    const std::uint32_t chunks = kPromptTokens / kChunkTokens;
    const std::uint64_t shard = kChunkTokens * kTokenBytes / hosts;
    Engine one(directory, hosts, false, shard, 2 * chunks, delay);
    Engine several(directory, hosts, true, shard, 2 * chunks, delay);
    std::vector<double> load[2];
    const std::uint64_t before = several.relayed_bytes();
    for (int round = 0; round < rounds; ++round) {
      const auto keys = keys_from(static_cast<std::uint64_t>(round) * chunks, chunks);
      for (int turn = 0; turn < 2; ++turn) {
        const int side = (turn + round) % 2;
        Engine* engine = side == 0 ? &one : &several;
        double wall = 0;
        engine->store(keys);
        engine->load(keys, &wall);
        load[side].push_back(wall);
      }
    }
    const auto bytes = static_cast<double>(several.relayed_bytes() - before);
    print_line("load of 8,192 tokens, until all results are known", load[0], load[1], 1e-3, "ms");
    fmt::print("bytes between the hosts per stored and loaded token: {:.3f}\n",
               bytes / (2.0 * kPromptTokens * rounds));
  }
  {
    const std::uint32_t chunks = kPromptTokens / kChunkTokens;
    const std::uint64_t shard = kChunkTokens * kTokenBytes / hosts;
    Engine one(directory, hosts, false, shard, 2 * chunks, delay, true);
    Engine several(directory, hosts, true, shard, 2 * chunks, delay, true);
    std::vector<double> load[2], calls[2];
    std::uint64_t relayed = 0;
    for (int round = 0; round < rounds; ++round) {
      const std::uint64_t first = static_cast<std::uint64_t>(round) * 3 * chunks;
      const auto keys = keys_from(first, chunks);
      for (int turn = 0; turn < 2; ++turn) {
        const int side = (turn + round) % 2;
        Engine* engine = side == 0 ? &one : &several;
        const std::uint64_t before = several.relayed_bytes();
        double wall = 0;
        // The second and third prompt evict the first one from host memory.
        for (std::uint64_t prompt = 0; prompt < 3; ++prompt) {
          engine->store(keys_from(first + prompt * chunks, chunks));
          engine->wait_for_writes();
        }
        calls[side].push_back(engine->load(keys, &wall));
        load[side].push_back(wall);
        relayed += several.relayed_bytes() - before;
      }
    }
    print_line("load of 8,192 tokens from directories", load[0], load[1], 1e-3, "ms");
    print_line("its prepare and complete, per chunk", calls[0], calls[1], 1e-9, "ns");
    fmt::print("bytes between the hosts per token that a tier stored or read: {:.3f}\n",
               static_cast<double>(relayed) / (4.0 * kPromptTokens * rounds));
  }
  std::filesystem::remove_all(directory);
}

}  // namespace
}  // namespace kv_offload::bench

int main(int argc, char** argv) {
  const int hosts = argc > 1 ? std::atoi(argv[1]) : 2;
  if (hosts < 2 || hosts > 64) {
    fmt::print(stderr, "hosts_calls: {} hosts were given; 2 to 64 are possible\n", argv[1]);
    return 2;
  }
  kv_offload::bench::run(static_cast<std::uint32_t>(hosts), argc > 2 ? std::atoi(argv[2]) : 15,
                         std::chrono::microseconds(argc > 3 ? std::atoi(argv[3]) : 0));
}
