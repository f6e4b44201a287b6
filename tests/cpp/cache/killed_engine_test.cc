// SPDX-License-Identifier: Apache-2.0
// Runs fifty engines one after the other and kills each at a random moment. Shared memory holds only
// 1.2 regions. Every engine must start, find all records and read no wrong byte. Then several at once, which
// read each other's memory.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/mount.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <random>
#include <thread>

#include "backends/fs/fixture.h"
#include "cache/cache_fixture.h"
#include "memory/child_process.h"
#include "memory/shared_file.h"
#include "test_iterations.h"

namespace kv_offload {
namespace {

constexpr std::uint64_t kRows = 1024;  // 8 MiB in two areas
constexpr std::uint64_t kRegion = 2 * kRows * kPageBytes;
constexpr std::uint32_t kMostKeys = 700;
constexpr std::uint64_t kFewRows = 128;  // for an engine whose host memory is kept

// Results of one engine run, for the next run and the test.
struct Told {
  std::atomic<std::uint32_t> next_key{0};
  std::atomic<std::uint64_t> progress{0};  // of this run
  std::atomic<bool> started{false}, looked{false};
  std::atomic<std::uint64_t> hits{0}, wrong{0};
  std::atomic<std::uint64_t> resident{0};  // at the end of the last step that stored
};

class KilledEngine : public ::testing::Test {
 protected:
  KilledEngine() : told_(make_told()) {
    std::filesystem::create_directory(shm_);
    // 1.2 regions, control page included.
    const std::string size = fmt::format("size={}", (kRegion + (std::uint64_t{600} << 10)) * 12 / 10);
    mounted_ = ::mount("tmpfs", shm_.c_str(), "tmpfs", 0, size.c_str()) == 0;
  }
  ~KilledEngine() override {
    if (mounted_) ::umount2(shm_.c_str(), MNT_DETACH);
    ::munmap(told_, sizeof(Told));
  }
  static Told* make_told() {
    void* memory = ::mmap(nullptr, sizeof(Told), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    return new (memory) Told;
  }
  // An engine without tiers whose host memory outlives it.
  WorldOptions kept_engine(int life) {
    return {.rows = kFewRows,
            .tier = false,
            .cache = {.keep_identity = "model"},
            .engine_id = fmt::format("engine-{}", life),
            .shm_directory = shm_,
            .keep_for = "model"};
  }
  WorldOptions engine(int life) {
    return {.rows = kRows,
            .cache = {.load_policy = LoadPolicy::kAlways},
            .engine_id = fmt::format("engine-{}", life),
            .shm_directory = shm_,
            .make_tier = [this](const Clock& clock) {
              FsTierOptions options = testing::options_for(root_, std::uint64_t{16} << 20);
              options.clock = &clock;
              return make_fs_tier(options);
            }};
  }
  // Keys stored so far, recorded or not.
  std::uint32_t stored() const { return std::min(told_->next_key.load(), kMostKeys); }
  static ChunkKey key(std::uint32_t number) { return key_of(fmt::format("k{}", number)); }

  // Looks up every chunk that was ever stored.
  void look_at_all(World& world) {
    for (std::uint32_t number = 0; number < stored(); ++number) {
      const RequestHandle request = world.cache->begin_request("r", {});
      const std::vector<ChunkKey> keys{key(number)};
      LookupResult seen;
      while ((seen = world.cache->lookup(request, keys[0])) != LookupResult::kMiss &&
             seen != LookupResult::kHit) {
        world.cache->end_step();
        std::this_thread::yield();
      }
      if (seen == LookupResult::kHit) {
        const RowTransfer transfer = world.cache->prepare_load(request, keys);
        told_->wrong += !world.holds(keys[0], transfer.rows[0], 0);
        world.report(transfer.ticket);
        world.cache->complete_load(keys);
        ++told_->hits;
      }
      world.cache->end_request(request);
      world.cache->end_step();
      ++told_->progress;
    }
    told_->looked = true;
  }
  void store_on(World& world) {
    for (;;) {
      // Repeats the keys: many engines are killed before a record is written.
      const std::uint32_t number = told_->next_key++ % kMostKeys;
      const RequestHandle request = world.cache->begin_request("r", {});
      const std::vector<ChunkKey> keys{key(number)};
      const StoreGrant grant = world.cache->prepare_store(request, keys);
      if (!grant.accepted.empty()) {
        world.copy(keys[0], grant.transfer.rows[0], 0);
        world.report(grant.transfer.ticket);
      }
      world.cache->complete_store(keys);
      world.cache->end_request(request);
      world.cache->end_step();
      told_->resident = world.cache->stats().resident_chunks;
      ++told_->progress;
      std::this_thread::yield();
    }
  }
  void live(const WorldOptions& options) {
    ++told_->progress;
    World world(options);
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
      if (!world.ranks[rank]->prefault(rank, 1)) throw std::runtime_error("no memory");
    }
    told_->started = true;
    ++told_->progress;
    look_at_all(world);
    store_on(world);
  }
  // Starts an engine and kills it at this progress. Returns false if it ended by itself.
  bool live_and_die(const WorldOptions& options, std::uint64_t progress) {
    told_->progress = told_->hits = 0;
    told_->started = told_->looked = false;
    Child child([&] { live(options); });
    const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(240);
    while (told_->progress < progress && std::chrono::steady_clock::now() < give_up)
      std::this_thread::yield();
    child.kill();
    return child.wait() == SIGKILL;
  }
  std::size_t names_in_shm() const {
    return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator(shm_), {}));
  }

  testing::TempDir dir_;
  std::string root_ = dir_.path() + "/root", shm_ = dir_.path() + "/shm";
  Told* const told_;
  bool mounted_ = false;
};

// A kill may come before anything happens, so that even a short run goes on until it has seen enough.
int most_lives(int least) { return std::max(300, 10 * least); }

TEST_F(KilledEngine, the_next_engine_finds_all_records_after_each_of_fifty_kills) {
  if (!mounted_) GTEST_SKIP() << "a tmpfs cannot be mounted here (needs root)";
  std::mt19937 random(3);
  const int least = testing::rounds(50);
  int life = 0, started = 0, looked = 0;
  const auto recorded_now = [&] {
    return std::filesystem::exists(root_) ? testing::records_in(root_).size() : 0;
  };
  // The point of each kill is random.
  const auto seen_all = [&] { return looked > life / 3 && started < life && recorded_now() > 20; };
  for (; life < least || (life < most_lives(least) && !seen_all()); ++life) {
    const std::size_t recorded = recorded_now();
    // Kills a third of the engines during startup, the others at a random point.
    const std::uint64_t progress = random() % 3 == 0 ? 1 : 2 + stored() + random() % 60;
    ASSERT_TRUE(live_and_die(engine(life), progress)) << "life " << life << " could not start";
    started += told_->started;
    if (!told_->looked) continue;
    ++looked;
    EXPECT_GE(told_->hits, recorded * 99 / 100) << "life " << life;
  }
  EXPECT_EQ(told_->wrong, 0u);
  EXPECT_GT(looked, life / 3);
  EXPECT_LT(started, life) << "no engine was killed during startup";
  {
    World last(engine(life));
    EXPECT_EQ(names_in_shm(), 0u);
    look_at_all(last);
    // Records become visible before the count of the root's files, which removes the leftover files.
    const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(240);
    while (!testing::temporaries_in(root_).empty() && std::chrono::steady_clock::now() < give_up) {
      last.cache->end_step();
      std::this_thread::yield();
    }
    EXPECT_THAT(testing::temporaries_in(root_), ::testing::IsEmpty());
  }
  EXPECT_EQ(told_->wrong, 0u);
  EXPECT_GT(recorded_now(), 20u);
}

// Host memory outlives its engine, and the next engine hits the resident chunks without a tier. Long runs
// store more keys than rows, so rows are reused.
TEST_F(KilledEngine, the_next_engine_hits_host_memory_after_each_of_fifty_kills) {
  if (!mounted_) GTEST_SKIP() << "a tmpfs cannot be mounted here (needs root)";
  std::mt19937 random(5);
  const int least = testing::rounds(50);
  int life = 0, looked = 0;
  std::uint64_t most = 0;
  for (; life < least || (life < most_lives(least) && (looked < life / 3 || most < kFewRows)); ++life) {
    const std::uint64_t resident = told_->resident;
    const std::uint64_t progress = random() % 3 == 0 ? 1 : 2 + stored() + random() % 200;
    ASSERT_TRUE(live_and_die(kept_engine(life), progress)) << "life " << life << " could not start";
    if (!told_->looked) continue;
    ++looked;
    // A kill may lose the chunk being stored and the chunk evicted for it.
    EXPECT_GE(told_->hits + 2, resident) << "life " << life;
    most = std::max(most, resident);
  }
  EXPECT_EQ(told_->wrong, 0u);
  EXPECT_GT(looked, life / 3);
  { const World last(kept_engine(life)); }  // removes what an engine left that was killed while it started
  EXPECT_EQ(names_in_shm(), 1u) << "more than one region is kept";
}

// Control: the next engine cannot start while another process holds the memory.
TEST_F(KilledEngine, the_test_detects_memory_that_was_not_released) {
  if (!mounted_) GTEST_SKIP() << "a tmpfs cannot be mounted here (needs root)";
  World holding(engine(0));
  for (std::uint32_t rank = 0; rank < 2; ++rank) ASSERT_TRUE(holding.ranks[rank]->prefault(rank, 1));
  EXPECT_THROW(World(engine(1)), ResourceError);
}

// ---- engines that share memory which outlives them

constexpr std::uint32_t kNeighbours = 3;
constexpr std::uint32_t kNeighbourKeys = 60;  // of each group; more than the rows of all engines
constexpr std::uint64_t kRowsOfEach = 96;
constexpr int kNeighbourOperations = 4'000;  // of all engines
constexpr std::uint64_t kOperationsOfLife = 300;

// What the engines report. Engine i is always the same one: its successor takes over its memory.
struct Reports {
  std::atomic<std::uint64_t> operations{0}, hits{0}, borrowed{0}, wrong{0}, lost{0}, taken_over{0}, lent{0};
  std::array<std::atomic<std::uint64_t>, kNeighbours> resident{};
  std::array<std::atomic<bool>, kNeighbours> stores{}, started{};  // stores: `resident` may change now
};

class KilledNeighbours : public KilledEngine {
 protected:
  KilledNeighbours() {
    void* memory =
        ::mmap(nullptr, sizeof(Reports), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    reports_ = new (memory) Reports;
  }
  ~KilledNeighbours() override { ::munmap(reports_, sizeof(Reports)); }

  WorldOptions sharing_engine(std::uint32_t i, std::uint32_t life, std::uint64_t rows = kRowsOfEach) {
    return {.rows = rows,
            .shard_bytes = {300, 3 * kPageBytes, 5000},
            .tier = false,
            .cache = {.load_policy = LoadPolicy::kAlways,
                      .keep_identity = "weights",
                      .share_identity = "weights",
                      .neighbour_interval = std::chrono::milliseconds(1)},
            .engine_id = fmt::format("engine-{}", life),
            .shm_directory = shm_,
            .keep_for = fmt::format("model, data-parallel rank {}", i),
            .share_for = "model"};
  }
  struct Load {
    std::vector<ChunkKey> keys;
    std::uint32_t group;
    RequestHandle request;
    RowTransfer transfer;
  };
  void check(const World& world, const Load& load) {
    if (!world.holds(load.keys[0], load.transfer.rows[0], load.group)) ++reports_->wrong;
  }
  void end(World& world, const Load& load) {
    check(world, load);
    world.report(load.transfer.ticket);
    world.cache->complete_load(load.keys);
    world.cache->end_request(load.request);
  }
  static void store(World& world, RequestHandle request, const ChunkKey& key, std::uint32_t group) {
    const std::vector<ChunkKey> keys{key};
    const StoreGrant grant = world.cache->prepare_store(request, keys);
    if (!grant.accepted.empty()) {
      world.copy(key, grant.transfer.rows[0], group);
      world.report(grant.transfer.ticket);
    }
    world.cache->complete_store(keys);
  }
  // Loads or stores a chunk, and ends some of the earlier loads.
  void do_one(World& world, std::uint32_t i, std::mt19937_64& random, std::vector<Load>* loads) {
    const auto group = static_cast<std::uint32_t>(random() % 3);
    const ChunkKey key = key_of(fmt::format("k{}", random() % kNeighbourKeys), group);
    const RequestHandle request = world.cache->begin_request("r", {});
    if (world.cache->lookup(request, key) == LookupResult::kHit) {
      Load load{{key}, group, request, {}};
      load.transfer = world.cache->prepare_load(request, load.keys);
      check(world, load);
      ++reports_->hits;
      reports_->borrowed += load.transfer.rows[0] >= world.region->neighbour_row(0, 0);
      loads->push_back(std::move(load));
    } else {
      reports_->stores[i] = true;
      store(world, request, key, group);
      world.cache->end_request(request);
    }
    while (loads->size() > random() % 8) {
      std::swap((*loads)[random() % loads->size()], loads->back());
      end(world, loads->back());
      loads->pop_back();
    }
    world.clock.advance(std::chrono::milliseconds(20));
    world.cache->end_step();
    reports_->resident[i] = world.cache->stats().resident_chunks;
    reports_->stores[i] = false;
    if (random() % 8 == 0) {
      for (auto& rank : world.ranks) rank->map_neighbours();
      reports_->lent += world.cache->stats().lent_chunks;
    }
    ++reports_->operations;
  }
  // Lives until it is killed.
  void live_sharing(std::uint32_t i, std::uint32_t life, std::uint64_t seed) {
    ::alarm(600);
    World world(sharing_engine(i, life));
    const std::uint64_t found = world.cache->stats().taken_over_chunks, resident = reports_->resident[i];
    reports_->taken_over += found;
    // One store may evict the small rows of a slab for a large one. Otherwise the number is exact.
    const std::uint64_t may_lack = reports_->stores[i] ? 16 : 0;
    if (found + may_lack < resident) reports_->lost += resident - found;
    if (may_lack == 0 && found > resident) throw std::runtime_error("more chunks than were stored");
    reports_->resident[i] = found;
    reports_->stores[i] = false;
    reports_->started[i] = true;
    std::mt19937_64 random(seed);
    std::vector<Load> loads;
    for (;;) do_one(world, i, random, &loads);
  }
  // False: nothing happened for a minute.
  static bool wait_until(const std::function<bool()>& condition) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(1);
    while (!condition()) {
      if (std::chrono::steady_clock::now() > deadline) return false;
      std::this_thread::yield();
    }
    return true;
  }
  std::size_t kept_names() const {
    std::size_t count = 0;
    for (const auto& entry : std::filesystem::directory_iterator(shm_))
      count += entry.path().filename().string().starts_with(kKeptNamePrefix) ? 1 : 0;
    return count;
  }

  Reports* reports_;
};

TEST_F(KilledNeighbours, neighbours_read_no_wrong_byte_and_successors_lose_no_chunk) {
  if (!mounted_) GTEST_SKIP() << "a tmpfs cannot be mounted here (needs root)";
  std::mt19937_64 random(13);
  std::array<std::optional<Child>, kNeighbours> engines;
  struct KillAll {  // also after a failed assertion
    std::array<std::optional<Child>, kNeighbours>& engines;
    ~KillAll() {
      for (auto& engine : engines) {
        if (engine) engine->kill();
      }
    }
  } const kill_all{engines};
  std::uint32_t life = 0, kills = 0, early = 0;
  const auto start = [&](std::uint32_t i) {
    reports_->started[i] = false;
    engines[i].emplace([this, i, mine = life++, seed = random()] { live_sharing(i, mine, seed); });
  };
  const auto kill = [&](std::uint32_t i) {
    early += reports_->started[i] ? 0 : 1;
    ++kills;
    engines[i]->kill();
    EXPECT_EQ(engines[i]->wait(), SIGKILL) << "engine " << i << " ended by itself";
    engines[i].reset();
  };
  for (std::uint32_t i = 0; i < kNeighbours; ++i) start(i);
  const auto operations = static_cast<std::uint64_t>(testing::rounds(kNeighbourOperations));
  const auto give_up = std::chrono::steady_clock::now() + std::chrono::minutes(15);
  while (reports_->operations < operations && std::chrono::steady_clock::now() < give_up && !HasFailure()) {
    const std::uint64_t next = reports_->operations + random() % kOperationsOfLife;
    ASSERT_TRUE(wait_until([&] { return reports_->operations >= next; })) << "the engines hang or have ended";
    const auto victim = static_cast<std::uint32_t>(random() % kNeighbours),
               other = (victim + 1) % kNeighbours;
    const bool stops_other = random() % 4 == 0;  // the others must go on, and start, while it is stopped
    if (stops_other) engines[other]->stop();
    kill(victim);
    if (random() % 4 == 0) kill(3 - victim - other);
    for (std::uint32_t i = 0; i < kNeighbours; ++i) {
      if (!engines[i]) start(i);
    }
    ASSERT_TRUE(!stops_other || wait_until([&] { return reports_->started[victim].load(); }))
        << "a start waits for a stopped neighbour";
    if (stops_other) engines[other]->resume();
    // While it starts, or just after. In the second half certainly while it starts, if none was before.
    const bool must = early == 0 && reports_->operations >= operations / 2;
    if (random() % 4 == 0 || must) {
      for (std::uint64_t spins = must ? 0 : random() % 20'000; spins > 0; --spins)
        std::atomic_signal_fence(std::memory_order_seq_cst);
      kill(victim);
      start(victim);
    }
  }
  EXPECT_GE(reports_->operations, operations) << "the engines hang";
  for (std::uint32_t i = 0; i < kNeighbours; ++i) kill(i);
  EXPECT_EQ(reports_->wrong, 0u);
  EXPECT_EQ(reports_->lost, 0u);
  if (operations >= kNeighbourOperations) {  // a shorter run proves less
    EXPECT_GT(reports_->borrowed, operations / 100) << "too few reads of neighbours to find anything";
    EXPECT_GT(reports_->lent, 0u) << "no owner met a row that was read";
    EXPECT_GT(reports_->taken_over, 0u);
  }
  EXPECT_GT(early, 0u) << "no engine was killed while it started";

  World last(sharing_engine(0, life));
  for (int i = 0; i < 3; ++i) {
    last.clock.advance(std::chrono::seconds(2));
    last.cache->end_step();
  }
  EXPECT_EQ(last.cache->stats().lent_chunks, 0u);
  EXPECT_EQ(last.cache->stats().quarantined_rows, 0u);
  EXPECT_EQ(names_in_shm(), kNeighbours + 1) << "three kept names, and the name of the last engine";
  std::vector<Load> loads;
  for (int i = 0; i < 500; ++i) do_one(last, 0, random, &loads);
  for (const Load& load : loads) end(last, load);
  EXPECT_EQ(reports_->wrong, 0u);
  std::printf(
      "%lu operations, %lu loads, %lu of them of neighbours, %u kills, %u during starts, %lu chunks "
      "taken over\n",
      reports_->operations.load(), reports_->hits.load(), reports_->borrowed.load(), kills, early,
      reports_->taken_over.load());
}

// Readers find within a second that an engine has ended, and hold its memory until then.
TEST_F(KilledNeighbours, a_start_waits_for_memory_that_readers_of_an_ended_engine_still_hold) {
  if (!mounted_) GTEST_SKIP() << "a tmpfs cannot be mounted here (needs root)";
  Signal ready;
  Child ended([&] {
    World world(sharing_engine(0, 0, 400));
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
      if (!world.ranks[rank]->prefault(rank, 1)) throw std::runtime_error("no memory");
    }
    ready.raise();
    ::pause();
  });
  ready.wait();
  WorldOptions made = sharing_engine(1, 1, 400);
  made.cache.neighbour_interval = Nanos(0);
  World reader(std::move(made));
  const auto step = [&] {
    reader.cache->end_step();
    for (auto& rank : reader.ranks) rank->map_neighbours();
  };
  for (int i = 0; i < 3; ++i) step();
  ASSERT_EQ(reader.cache->stats().neighbours, 1u);
  ended.kill();
  ended.wait();
  std::thread leaves([&] {
    (void)wait_until([&] { return kept_names() <= 1; });
    for (int i = 0; i < 3; ++i) step();
  });
  std::optional<World> next;
  EXPECT_NO_THROW(next.emplace(sharing_engine(0, 2, 900)));
  leaves.join();
}

}  // namespace
}  // namespace kv_offload
