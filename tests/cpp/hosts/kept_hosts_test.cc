// SPDX-License-Identifier: Apache-2.0
// Host memory of engines on several hosts that outlives them: a chunk is a hit only if every host still has
// its part. Each host of a test has a shared memory directory of its own.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cache/cache_fixture.h"
#include "hosts/host_agent.h"
#include "hosts/host_links.h"
#include "hosts/two_hosts.h"
#include "memory/child_process.h"
#include "memory/shared_file.h"
#include "memory/shm_fixture.h"
#include "test_iterations.h"

namespace kv_offload {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::holds_soon;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr Nanos kLongWait = std::chrono::minutes(2);
constexpr std::uint32_t kEngineHosts = 3;
constexpr std::uint64_t kEngineRows = 4, kEnginePart = 300;

std::string kept_file_in(const std::string& directory) {
  std::string found;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    if (!entry.path().filename().string().starts_with(kKeptNamePrefix)) continue;
    EXPECT_EQ(found, "") << "two kept regions";
    found = entry.path();
  }
  return found;
}

HostAgent::Options keeping_agent() {
  HostAgent::Options made;
  made.address = "127.0.0.1";
  made.version = "1.2.3";
  made.silence = kLongWait;
  return made;
}

HostLinks::Options keeping_links() {
  HostLinks::Options made;
  made.version = "1.2.3";
  made.silence = made.alive_interval = made.connect_timeout = kLongWait;
  made.first_pause = made.last_pause = std::chrono::milliseconds(1);
  return made;
}

// An engine with one rank on each of three hosts, in one process.
class KeepingEngine {
 public:
  struct Hosts {
    std::array<RegionOptions, kEngineHosts> regions;
    // Other values give other bytes for the same key.
    std::uint64_t weights = 0;
    // How far it starts.
    enum class Until : std::uint8_t { kConnected, kKept, kCache } until = Until::kCache;
  };

  explicit KeepingEngine(const Hosts& hosts) : weights_(hosts.weights) {
    for (std::uint32_t host = 0; host < kEngineHosts; ++host)
      regions[host] = HostRegion::attach_worker(hosts.regions[host], host, {{kEnginePart}, "layout"});
    RegionOptions unknown = hosts.regions[0];
    unknown.local_ranks = 0;
    scheduler = HostRegion::attach_scheduler(unknown);
    std::vector<RemoteHost> others;
    for (std::uint32_t host = 1; host < kEngineHosts; ++host) {
      agents.push_back(std::make_unique<HostAgent>(regions[host], keeping_agent()));
      regions[0]->set_endpoint(host, agents.back()->endpoint());
      others.push_back({host, 1});
    }
    links = std::make_unique<HostLinks>(scheduler, others, keeping_links());
    EXPECT_TRUE(links->wait_until_connected(kLongWait).is_ok());
    if (hosts.until == Hosts::Until::kConnected) return;
    memory = links->keep_memory(kLongWait);
    if (hosts.until == Hosts::Until::kKept) return;
    CacheOptions options;
    options.keep_identity = "weights " + memory.identity;
    GroupGeometry group;
    group.tokens_per_chunk = 16;
    for (std::uint32_t host = 0; host < kEngineHosts; ++host) group.shard_bytes[host] = kEnginePart;
    options.groups.push_back(group);
    cache = std::make_unique<TieredCache>(options, scheduler, std::vector<std::unique_ptr<Tier>>(), metrics,
                                          clock);
    EXPECT_TRUE(cache->stats().is_kept);
  }
  ~KeepingEngine() {
    cache.reset();
    links.reset();
    agents.clear();
  }

  Shard part(RowId row, std::uint32_t host) const { return regions[host]->shard(host, row, kEnginePart); }

  void store(const std::string& name) {
    const std::vector<ChunkKey> keys{kv_offload::key_of(name)};
    const RequestHandle request = cache->begin_request("r", {});
    const StoreGrant grant = cache->prepare_store(request, keys);
    for (std::uint32_t host = 0; host < kEngineHosts && !grant.accepted.empty(); ++host) {
      fill(part(grant.transfer.rows[0], host), keys[0], host, weights_);
      regions[host]->report(host, grant.transfer.ticket, 0);
    }
    if (!grant.accepted.empty()) cache->complete_store(keys);
    cache->end_request(request);
    settle();
  }
  // Offers a chunk of which only host 1 has written its part when the engine ends.
  void begin_store(const std::string& name) {
    const StoreGrant grant =
        cache->prepare_store(cache->begin_request("r", {}), std::vector{kv_offload::key_of(name)});
    ASSERT_EQ(grant.accepted.size(), 1u);
    fill(part(grant.transfer.rows[0], 1), kv_offload::key_of(name), 1, weights_);
    regions[1]->report(1, grant.transfer.ticket, 0);
  }
  // True if the chunk is a hit. Expects that then the parts of all hosts are right, of one engine.
  bool hits(const std::string& name) {
    const std::vector<ChunkKey> keys{kv_offload::key_of(name)};
    const RequestHandle request = cache->begin_request("r", {});
    const bool hit = cache->lookup(request, keys[0]) == LookupResult::kHit;
    if (hit) {
      const RowTransfer transfer = cache->prepare_load(request, keys);
      bool right = false;
      for (std::uint64_t weights = 0; weights <= weights_; ++weights) {
        std::uint32_t parts = 0;
        for (std::uint32_t host = 0; host < kEngineHosts; ++host)
          parts += matches(part(transfer.rows[0], host), keys[0], host, weights);
        right |= parts == kEngineHosts;
      }
      EXPECT_TRUE(right) << "wrong bytes of " << name;
      for (std::uint32_t host = 0; host < kEngineHosts; ++host)
        regions[host]->report(host, transfer.ticket, 0);
      cache->complete_load(keys);
    }
    cache->end_request(request);
    settle();
    return hit;
  }
  void settle() {
    EXPECT_TRUE(holds_soon([&] {
      cache->end_step();
      // A load pins its chunk until the reports of the other hosts have arrived.
      return !cache->has_pending_work() && cache->stats().pinned_chunks == 0;
    }));
  }

  Metrics metrics;
  FakeClock clock;
  std::array<std::shared_ptr<HostRegion>, kEngineHosts> regions;
  std::shared_ptr<HostRegion> scheduler;
  std::vector<std::unique_ptr<HostAgent>> agents;
  std::unique_ptr<HostLinks> links;
  KeptMemory memory;
  std::unique_ptr<TieredCache> cache;

 private:
  const std::uint64_t weights_;
};

class KeptOnHosts : public ShmTest {
 protected:
  using Until = KeepingEngine::Hosts::Until;

  KeptOnHosts() {
    for (std::uint32_t host = 0; host < kEngineHosts; ++host) {
      std::filesystem::create_directories(shm(host));
      std::filesystem::create_directories(shelf(host));
    }
  }

  std::string shm(std::uint32_t host) const { return fmt::format("{}/host{}", directory_, host); }
  std::string shelf(std::uint32_t host) const { return fmt::format("{}/shelf{}", directory_, host); }
  RegionOptions region_options(std::uint32_t host, std::uint64_t rows = kEngineRows) const {
    RegionOptions made = options(rows * kPageBytes * kEngineHosts, kEngineHosts,
                                 fmt::format("engine {} host {}", engines_, host));
    made.shm_directory = shm(host);
    made.first_rank = host;
    made.local_ranks = 1;
    made.keep_for = "model";
    return made;
  }
  std::unique_ptr<KeepingEngine> start(Until until = Until::kCache) {
    ++engines_;
    KeepingEngine::Hosts hosts;
    for (std::uint32_t host = 0; host < kEngineHosts; ++host) hosts.regions[host] = region_options(host);
    hosts.weights = engines_;
    hosts.until = until;
    return std::make_unique<KeepingEngine>(hosts);
  }
  void lose(std::uint32_t host) const {
    if (const std::string file = kept_file_in(shm(host)); !file.empty()) std::filesystem::remove(file);
  }
  // Exchanges the host's kept region for another one, if there is one. It stands for a region that another
  // process has used meanwhile.
  void exchange(std::uint32_t host) const {
    const std::string file = kept_file_in(shm(host)), other = kept_file_in(shelf(host));
    const auto name = [](const std::string& path) { return std::filesystem::path(path).filename().string(); };
    if (!file.empty()) std::filesystem::rename(file, directory_ + "/moved");
    if (!other.empty()) std::filesystem::rename(other, shm(host) + "/" + name(other));
    if (!file.empty()) std::filesystem::rename(directory_ + "/moved", shelf(host) + "/" + name(file));
  }

  std::uint64_t engines_ = 0;
};

TEST_F(KeptOnHosts, the_next_engine_hits_the_chunks_of_all_hosts) {
  std::string identity;
  {
    const auto engine = start();
    EXPECT_THAT(engine->memory.missing, IsEmpty()) << "there was nothing to miss";
    EXPECT_THAT(engine->memory.ending, IsEmpty());
    engine->store("a");
    engine->store("b");
    identity = engine->memory.identity;
  }
  for (std::uint32_t host = 0; host < kEngineHosts; ++host) EXPECT_NE(kept_file_in(shm(host)), "");
  for (int i = 0; i < 2; ++i) {
    const auto engine = start();
    EXPECT_THAT(engine->memory.missing, IsEmpty());
    EXPECT_EQ(engine->memory.identity, identity);
    EXPECT_EQ(engine->cache->stats().taken_over_chunks, 2u);
    EXPECT_TRUE(engine->hits("a"));
    EXPECT_TRUE(engine->hits("b"));
    EXPECT_FALSE(engine->hits("c"));
  }
}

// Without steps, the chunk would not get into the table.
TEST_F(KeptOnHosts, an_idle_engine_makes_steps_until_late_reports_have_arrived) {
  const auto engine = start();
  const std::vector<ChunkKey> keys{kv_offload::key_of("late")};
  const RequestHandle request = engine->cache->begin_request("r", {});
  const StoreGrant grant = engine->cache->prepare_store(request, keys);
  ASSERT_EQ(grant.accepted.size(), 1u);
  engine->regions[0]->report(0, grant.transfer.ticket, 0);
  engine->cache->complete_store(keys);
  engine->cache->end_request(request);
  engine->cache->end_step();
  EXPECT_TRUE(engine->cache->has_pending_work());
  for (std::uint32_t host = 1; host < kEngineHosts; ++host)
    engine->regions[host]->report(host, grant.transfer.ticket, 0);
  engine->settle();
  EXPECT_EQ(engine->cache->stats().resident_chunks, 1u);
}

TEST_F(KeptOnHosts, a_chunk_that_was_being_stored_or_was_evicted_is_a_miss) {
  {
    const auto engine = start();
    engine->store("a");
    for (std::uint64_t row = 0; row < kEngineRows; ++row) engine->store(fmt::format("new{}", row));
    engine->begin_store("unfinished");  // evicts another chunk
  }
  const auto engine = start();
  EXPECT_EQ(engine->cache->stats().taken_over_chunks, kEngineRows - 1);
  EXPECT_FALSE(engine->hits("a"));
  EXPECT_FALSE(engine->hits("unfinished"));
  EXPECT_TRUE(engine->hits("new3"));
}

TEST_F(KeptOnHosts, no_chunk_is_a_hit_if_one_host_has_lost_its_memory) {
  for (std::uint32_t host = 0; host < kEngineHosts; ++host) {
    start()->store("a");
    lose(host);
    {
      const auto engine = start();
      EXPECT_THAT(engine->memory.missing,
                  ElementsAre(AllOf(HasSubstr(fmt::format("the host of rank {}", host)),
                                    HasSubstr("it has no host memory of an earlier engine"))));
      EXPECT_EQ(engine->cache->stats().taken_over_chunks, 0u);
      EXPECT_FALSE(engine->hits("a"));
      engine->store("b");
    }
    EXPECT_TRUE(start()->hits("b")) << "the engine after that has the memory of all hosts again";
  }
}

TEST_F(KeptOnHosts, each_host_is_named_with_its_reason) {
  start()->store("a");
  lose(1);
  ++engines_;
  {  // leaves a region of another size on host 1
    const auto other =
        HostRegion::attach_worker(region_options(1, kEngineRows + 1), 1, {{kEnginePart}, "layout"});
    EXPECT_TRUE(other->keep());
  }
  {  // and one of an engine that no other host belonged to on host 2
    const auto other = HostRegion::attach_worker(region_options(2), 2, {{kEnginePart}, "layout"});
    EXPECT_EQ(other->kept().origin, RegionOrigin::kAdopted);
    other->set_region_set({7, 8});
    EXPECT_TRUE(other->keep());
  }
  const auto engine = start();
  EXPECT_THAT(
      engine->memory.missing,
      ElementsAre(AllOf(HasSubstr("the host of rank 1 at 127.0.0.1: its host memory had other sizes")),
                  HasSubstr("the host of rank 2 at 127.0.0.1: its host memory was last used by another "
                            "engine, or with other hosts")));
  EXPECT_FALSE(engine->hits("a"));
}

// Host 0 has the table of an earlier engine, and the other hosts have its memory, which a later engine has
// written. It was not this table's engine.
TEST_F(KeptOnHosts, an_earlier_table_does_not_describe_rows_that_a_later_engine_has_written) {
  start()->store("a");
  exchange(0);
  start()->store("b");  // in the same row
  exchange(0);
  {
    const auto engine = start();
    EXPECT_EQ(engine->memory.missing.size(), 2u);
    EXPECT_FALSE(engine->hits("a"));
    EXPECT_FALSE(engine->hits("b"));
  }
  exchange(0);
  EXPECT_FALSE(start()->hits("b")) << "the engine before has begun another set";
}

TEST_F(KeptOnHosts, memory_of_other_weights_is_not_used) {
  start()->store("a");
  ++engines_;
  {
    KeepingEngine::Hosts hosts;
    for (std::uint32_t host = 0; host < kEngineHosts; ++host) hosts.regions[host] = region_options(host);
    hosts.until = Until::kKept;
    KeepingEngine engine(hosts);
    EXPECT_THAT(engine.memory.missing, IsEmpty());
    CacheOptions options;
    options.keep_identity = "other weights " + engine.memory.identity;
    GroupGeometry group;
    group.tokens_per_chunk = 16;
    for (std::uint32_t host = 0; host < kEngineHosts; ++host) group.shard_bytes[host] = kEnginePart;
    options.groups.push_back(group);
    TieredCache cache(options, engine.scheduler, {}, engine.metrics, engine.clock);
    EXPECT_EQ(cache.stats().taken_over_chunks, 0u);
  }
  EXPECT_FALSE(start()->hits("a"));
}

TEST_F(KeptOnHosts, a_reset_removes_the_chunks_of_all_hosts_also_of_one_that_is_lost) {
  for (const bool is_lost : {false, true}) {
    {
      const auto engine = start();
      engine->store("a");
      EXPECT_TRUE(engine->hits("a"));
      if (is_lost) {
        engine->agents[0]->close();
        EXPECT_TRUE(holds_soon([&] { return engine->scheduler->is_cut_off(); }));
      }
      engine->cache->reset();
    }
    const auto engine = start();
    EXPECT_FALSE(engine->hits("a"));
    engine->store("b");
    EXPECT_TRUE(engine->hits("b"));
  }
}

TEST_F(KeptOnHosts, starts_that_fail_change_no_chunk) {
  start()->store("a");
  start(Until::kConnected).reset();
  start(Until::kKept).reset();
  EXPECT_TRUE(start()->hits("a"));
}

// Whatever happens between the lives of engines, all parts of a hit are from one engine.
TEST_F(KeptOnHosts, parts_of_different_engines_are_never_combined) {
  std::mt19937 random(11);
  const auto one_in = [&](unsigned count) { return random() % count == 0; };
  std::uint64_t hits = 0, drops = 0;
  const int least = testing::rounds(20);
  for (int life = 0; life < least || (life < 1000 && (hits < 10 || drops < 3)); ++life) {
    for (std::uint32_t host = 0; host < kEngineHosts; ++host) {
      if (one_in(12)) lose(host);
      if (one_in(8)) exchange(host);
    }
    if (one_in(6)) start(Until::kConnected).reset();
    if (one_in(6)) start(Until::kKept).reset();
    if (one_in(6)) {  // killed while the scheduler told the hosts: some have the new set
      ++engines_;
      for (std::uint32_t host = 0; host < kEngineHosts; ++host) {
        if (host > 0 && one_in(2)) continue;
        const auto region = HostRegion::attach_worker(region_options(host), host, {{kEnginePart}, "layout"});
        region->set_region_set({1 + engines_, 0});
        if (host > 0) {
          EXPECT_TRUE(region->keep());
        }
      }
    }
    const auto engine = start();
    drops += !engine->memory.missing.empty();
    for (int name = 0; name < 8; ++name) hits += engine->hits(fmt::format("{}", name));
    for (unsigned stores = random() % 6; stores > 0; --stores) engine->store(fmt::format("{}", random() % 8));
    if (one_in(4)) engine->begin_store(fmt::format("unfinished{}", life));
    if (one_in(8)) engine->cache->reset();
  }
  EXPECT_GE(hits, 10u);
  EXPECT_GE(drops, 3u);
}

// ---- orders to a host

TEST_F(KeptOnHosts, orders_to_keep_memory_that_fit_no_host_end_the_connection) {
  const auto engine = start(Until::kKept);
  engine->links.reset();
  const RegionSet set = engine->regions[1]->kept().set, other{set[0] ^ 2, set[1]};
  const HostEndpoint endpoint = *parse_endpoint(engine->agents[0]->endpoint());
  const auto ends = [&](const Bytes& body) {
    testing::OtherScheduler scheduler(endpoint);
    EXPECT_TRUE(scheduler.reads(FrameType::kReady));
    scheduler.send(FrameType::kKeepMemory, body);
    return scheduler.is_closed_soon();
  };
  EXPECT_TRUE(ends(encode(other))) << "rows may have been written in the first set";
  EXPECT_TRUE(ends(Bytes(16))) << "no set";
  EXPECT_TRUE(ends(Bytes(15, 1)));
  EXPECT_TRUE(ends(Bytes(17, 1)));
  EXPECT_EQ(engine->regions[1]->kept().set, set);
  testing::OtherScheduler again(endpoint);
  EXPECT_TRUE(again.reads(FrameType::kReady));
  again.send(FrameType::kKeepMemory, encode(set));
  EXPECT_TRUE(again.reads(FrameType::kMemoryKept)) << "the first answer may have been lost";
}

TEST_F(KeptOnHosts, a_host_without_the_setting_takes_no_order) {
  ++engines_;
  RegionOptions options = region_options(1);
  options.keep_for.clear();
  const std::shared_ptr<HostRegion> region = HostRegion::attach_worker(options, 1, {{kEnginePart}, "layout"});
  HostAgent agent(region, keeping_agent());
  testing::OtherScheduler scheduler(*parse_endpoint(agent.endpoint()));
  EXPECT_TRUE(scheduler.reads(FrameType::kReady));
  scheduler.send(FrameType::kKeepMemory, encode(RegionSet{1, 2}));
  EXPECT_TRUE(scheduler.is_closed_soon());
  EXPECT_FALSE(is_set(region->kept().set));
}

// ---- killed processes

// Two hosts with a process each. Both may be killed at any moment. They share this page.
struct KilledHostsPage {
  std::atomic<std::uint64_t> progress{0};  // of this life
  std::array<char, 256> endpoint{};
  std::atomic<bool> announced{false}, looked{false};
  std::atomic<std::uint64_t> hits{0}, wrong{0}, stored{0};
  std::atomic<std::int64_t> taken_over{-1};  // -1: not known yet
  // The job of host 1, which takes the place of vLLM's message to its rank.
  std::atomic<std::uint64_t> job{0}, answered{0};  // numbers
  std::atomic<bool> is_store{false}, is_right{false};
  std::atomic<RowId> row{0};
  std::atomic<std::uint32_t> chunk{0};
  std::atomic<Ticket> ticket{0};
};

class KilledHosts : public ShmTest {
 protected:
  static constexpr std::uint32_t kChunks = 24, kFewRows = 12;
  static constexpr std::uint64_t kPartBytes = 8192;

  KilledHosts() {
    void* memory =
        ::mmap(nullptr, sizeof(KilledHostsPage), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    page_ = new (memory) KilledHostsPage;
    for (const std::uint32_t host : {0u, 1u}) std::filesystem::create_directories(shm(host));
  }
  ~KilledHosts() override { ::munmap(page_, sizeof(KilledHostsPage)); }
  std::string shm(std::uint32_t host) const { return fmt::format("{}/host{}", directory_, host); }
  RegionOptions region_options(std::uint32_t host) const {
    RegionOptions made = options(kFewRows * kPartBytes * 2, 2, fmt::format("engine {} host {}", life_, host));
    made.shm_directory = shm(host);
    made.first_rank = host;
    made.local_ranks = 1;
    made.keep_for = "model";
    return made;
  }
  static ChunkKey key(std::uint32_t number) { return kv_offload::key_of(fmt::format("k{}", number)); }

  void run_host_1() {
    const std::shared_ptr<HostRegion> region =
        HostRegion::attach_worker(region_options(1), 1, {{kPartBytes}, "layout"});
    HostAgent agent(region, keeping_agent());
    const std::string endpoint = agent.endpoint();
    std::copy(endpoint.begin(), endpoint.end(), page_->endpoint.begin());
    page_->announced = true;
    for (std::uint64_t done = 0;;) {
      const std::uint64_t job = page_->job;
      if (job == done) {
        std::this_thread::yield();
        continue;
      }
      const Shard part = region->shard(1, page_->row, kPartBytes);
      const ChunkKey chunk = key(page_->chunk);
      if (page_->is_store) {
        fill(part, chunk, 1);
        ++page_->progress;
        region->report(1, page_->ticket, 0);
      } else {
        page_->is_right = matches(part, chunk, 1);
      }
      done = job;
      page_->answered = job;
    }
  }
  void give_host_1(bool is_store, RowId row, std::uint32_t chunk, Ticket ticket) {
    page_->is_store = is_store;
    page_->row = row;
    page_->chunk = chunk;
    page_->ticket = ticket;
    ++page_->job;
    ++page_->progress;
  }
  // False if the host is lost. Its process may have been killed.
  bool host_1_answers(const HostRegion& region) {
    while (page_->answered != page_->job) {
      if (region.is_cut_off()) return false;
      std::this_thread::yield();
    }
    return true;
  }

  void run_host_0() {
    const auto rank = HostRegion::attach_worker(region_options(0), 0, {{kPartBytes}, "layout"});
    const std::shared_ptr<HostRegion> region = HostRegion::attach_scheduler(region_options(0));
    while (!page_->announced) std::this_thread::yield();
    ++page_->progress;
    rank->set_endpoint(1, page_->endpoint.data());
    HostLinks links(region, {{1, 1}}, keeping_links());
    while (!links.wait_until_connected(kLongWait)) {
    }
    ++page_->progress;
    CacheOptions options;
    options.keep_identity = "weights " + links.keep_memory(kLongWait).identity;
    ++page_->progress;
    GroupGeometry group;
    group.tokens_per_chunk = 16;
    group.shard_bytes[0] = group.shard_bytes[1] = kPartBytes;
    options.groups.push_back(group);
    Metrics metrics;
    FakeClock clock;
    TieredCache cache(options, region, {}, metrics, clock);
    page_->taken_over = static_cast<std::int64_t>(cache.stats().taken_over_chunks);
    const auto look_at = [&](std::uint32_t chunk) {
      const std::vector<ChunkKey> keys{key(chunk)};
      const RequestHandle request = cache.begin_request("r", {});
      if (cache.lookup(request, keys[0]) == LookupResult::kHit) {
        const RowTransfer transfer = cache.prepare_load(request, keys);
        give_host_1(false, transfer.rows[0], chunk, transfer.ticket);
        if (host_1_answers(*region)) {
          page_->wrong += !page_->is_right;
          page_->wrong += !matches(rank->shard(0, transfer.rows[0], kPartBytes), keys[0], 0);
          ++page_->hits;
        }
        cache.complete_load(keys);
      }
      cache.end_request(request);
      cache.end_step();
      ++page_->progress;
    };
    for (std::uint32_t chunk = 0; chunk < kChunks; ++chunk) look_at(chunk);
    page_->looked = true;
    for (;; ++page_->progress) {
      const std::uint32_t chunk = static_cast<std::uint32_t>(page_->stored++ % kChunks);
      const std::vector<ChunkKey> keys{key(chunk)};
      const RequestHandle request = cache.begin_request("r", {});
      const StoreGrant grant = cache.prepare_store(request, keys);
      if (!grant.accepted.empty()) {
        give_host_1(true, grant.transfer.rows[0], chunk, grant.transfer.ticket);
        fill(rank->shard(0, grant.transfer.rows[0], kPartBytes), keys[0], 0);
        rank->report(0, grant.transfer.ticket, 0);
        std::uint64_t failed = 0;
        while (host_1_answers(*region) && !region->is_cut_off() &&
               region->result(grant.transfer.ticket, &failed) == TicketResult::kPending)
          std::this_thread::yield();
        cache.complete_store(keys);
      }
      cache.end_request(request);
      cache.end_step();
    }
  }

  KilledHostsPage* page_;
  int life_ = 0;
};

TEST_F(KilledHosts, no_kill_of_a_process_of_any_host_leaves_a_wrong_byte) {
  std::mt19937 random(7);
  int looked = 0;
  std::uint64_t hits = 0;
  const int least = testing::rounds(12);
  // The point of each kill is random.
  for (; life_ < least || (life_ < 10 * least && (hits < kFewRows || looked < life_ / 4)); ++life_) {
    page_->progress = page_->hits = page_->job = page_->answered = 0;
    page_->announced = page_->looked = false;
    page_->taken_over = -1;
    const bool is_full = page_->stored >= 2 * kFewRows;
    page_->endpoint.fill(0);
    Child other([&] { run_host_1(); });
    Child first([&] { run_host_0(); });
    const std::uint64_t progress = random() % 4 == 0 ? random() % 5 : kChunks + random() % 200;
    const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(50);
    while (page_->progress < progress && std::chrono::steady_clock::now() < give_up)
      std::this_thread::yield();
    ASSERT_GE(page_->progress.load(), progress) << "life " << life_ << " is stuck";
    // One process survives the other for a moment, and still writes.
    const bool is_first = random() % 2 == 0;
    (is_first ? first : other).kill();
    for (unsigned moment = random() % 50; moment > 0; --moment) std::this_thread::yield();
    (is_first ? other : first).kill();
    EXPECT_EQ(first.wait(), SIGKILL);
    EXPECT_EQ(other.wait(), SIGKILL);
    looked += page_->looked;
    hits += page_->hits;
    if (page_->taken_over < 0 || !is_full) continue;
    EXPECT_GE(page_->taken_over, std::int64_t{kFewRows} - 2)
        << "life " << life_ << ": more than the chunk that "
        << "was being stored and the one that was evicted for it";
  }
  EXPECT_EQ(page_->wrong, 0u);
  EXPECT_GE(hits, kFewRows);
  EXPECT_GT(looked, 0);
}

}  // namespace
}  // namespace kv_offload
