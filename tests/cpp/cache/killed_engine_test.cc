// SPDX-License-Identifier: Apache-2.0
// Runs fifty engines one after the other and kills each at a random moment. Shared memory holds only
// 1.2 regions. Every engine must start, find all records and read no wrong byte.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/mount.h>

#include <algorithm>
#include <atomic>
#include <random>

#include "backends/fs/fixture.h"
#include "cache/cache_fixture.h"
#include "memory/child_process.h"
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

}  // namespace
}  // namespace kv_offload
