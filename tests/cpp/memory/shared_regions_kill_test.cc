// SPDX-License-Identifier: Apache-2.0
// Four processes store, read each other's rows and are killed at random moments. No reader sees a wrong byte,
// no process waits for a dead or stopped one, and nothing is left at the end. Then one whose memory outlives
// it: the next one takes over every row that was whole.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <array>
#include <atomic>
#include <chrono>
#include <optional>
#include <random>
#include <thread>

#include "memory/child_process.h"
#include "memory/sharing_engine.h"
#include "memory/shm_fixture.h"
#include "test_iterations.h"

namespace kv_offload {
namespace {

using testing::SharingEngine;

constexpr std::uint32_t kSharingEngines = 4;
constexpr std::uint32_t kSharedKeys = 200;  // fewer than the rows of all engines
constexpr int kSharedOperations = 100'000;  // of all engines
// At most so many operations until the next kill: about 100 ms on two cores, also in a long run.
constexpr std::uint64_t kOperationsPerLife = 2'000;
constexpr int kKeptLives = 40;

struct SharedCounts {
  std::atomic<std::uint64_t> operations{0}, reads{0}, wrong{0}, lent{0};
  std::atomic<bool> stop{false};
  // Of the engine whose memory is kept: the number of the key in each row plus one; 0 while the row changes.
  std::array<std::atomic<std::uint32_t>, SharingEngine::kRows> stored{};
  std::atomic<std::uint64_t> lost{0}, taken_over{0};
};

class SharedRegionsKill : public ShmTest {
 protected:
  SharedRegionsKill() {
    void* memory =
        ::mmap(nullptr, sizeof(SharedCounts), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    counts_ = new (memory) SharedCounts;
  }
  ~SharedRegionsKill() override { ::munmap(counts_, sizeof(SharedCounts)); }

  void run(std::uint32_t life, std::uint64_t seed) {
    ::alarm(600);
    std::mt19937_64 random(seed);
    SharingEngine engine(directory_, "engine-" + std::to_string(life));
    std::vector<SharingEngine::Held> held;
    const auto release = [&](std::size_t i) {
      if (!engine.is_right(held[i])) ++counts_->wrong;
      engine.unpin(held[i]);
      held.erase(held.begin() + static_cast<std::ptrdiff_t>(i));
    };
    while (!counts_->stop) {
      ++counts_->operations;
      const std::uint64_t choice = random() % 100;
      const auto number = static_cast<std::uint32_t>(random() % kSharedKeys);
      if (choice < 40) {
        const auto row = static_cast<RowId>(random() % SharingEngine::kRows);
        if (!engine.store(row, number)) ++counts_->lent;
      } else if (choice < 75) {
        const auto found = engine.pin(number);
        if (!found) continue;
        ++counts_->reads;
        if (!engine.is_right(*found)) ++counts_->wrong;
        held.push_back(*found);
        if (held.size() > 8) release(random() % held.size());
      } else if (choice < 97) {
        if (!held.empty()) release(random() % held.size());
      } else if (choice < 99) {
        engine.look_around();
        engine.clear_dead_readers();
      } else {
        std::this_thread::yield();
      }
    }
    while (!held.empty()) release(0);
  }

  void check_taken_over(const SharingEngine& engine) {
    for (RowId row = 0; row < SharingEngine::kRows; ++row) {
      const std::uint32_t stored = counts_->stored[row];
      const auto found = engine.taken_over.find(row);
      if (found != engine.taken_over.end() && !engine.has_bytes(row, found->second)) ++counts_->wrong;
      if (stored == 0) continue;
      const bool is_there = found != engine.taken_over.end() && found->second == stored - 1;
      ++(is_there ? counts_->taken_over : counts_->lost);
    }
  }
  std::unique_ptr<SharingEngine> kept_engine(int life) const {
    return std::make_unique<SharingEngine>(directory_, "kept-" + std::to_string(life), "weights",
                                           SharingEngine::kRows, true);
  }
  // Stores until it is killed.
  void live_kept(int life, std::uint64_t seed) {
    const auto engine = kept_engine(life);
    check_taken_over(*engine);
    std::mt19937_64 random(seed);
    for (;;) {
      const auto row = static_cast<RowId>(random() % SharingEngine::kRows);
      const auto number = static_cast<std::uint32_t>(random() % kSharedKeys);
      counts_->stored[row] = 0;
      if (engine->store(row, number)) {
        counts_->stored[row] = number + 1;
      } else {
        ++counts_->lent;
      }
      if (++counts_->operations % 64 == 0) engine->clear_dead_readers();
    }
  }

  SharedCounts* counts_;
};

TEST_F(SharedRegionsKill, four_processes_that_are_killed_read_no_wrong_byte_and_leave_nothing) {
  const auto operations = static_cast<std::uint64_t>(testing::rounds(kSharedOperations));
  std::mt19937_64 random(7);
  std::uint32_t life = 0;
  std::array<std::optional<Child>, kSharingEngines> engines;
  const auto start = [&](std::uint32_t i) {
    const std::uint32_t mine = life++;
    const std::uint64_t seed = random();
    engines[i].emplace([this, mine, seed] { run(mine, seed); });
  };
  for (std::uint32_t i = 0; i < kSharingEngines; ++i) start(i);
  std::uint32_t kills = 0;
  const auto give_up = std::chrono::steady_clock::now() + std::chrono::minutes(10);
  while (counts_->operations < operations && std::chrono::steady_clock::now() < give_up) {
    // The moment of the kill follows the work, so that a slow machine kills as often.
    const std::uint64_t next =
        counts_->operations + random() % std::min<std::uint64_t>(operations / 20 + 1, kOperationsPerLife);
    while (counts_->operations < next && std::chrono::steady_clock::now() < give_up)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const auto victim = static_cast<std::uint32_t>(random() % kSharingEngines);
    if (random() % 4 == 0) {  // the others must go on while it is stopped
      engines[victim]->stop();
      const std::uint64_t then =
          counts_->operations + std::min<std::uint64_t>(operations / 100, kOperationsPerLife);
      while (counts_->operations < then && std::chrono::steady_clock::now() < give_up)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      if (random() % 2 == 0) {
        engines[victim]->resume();
        continue;
      }
    }
    engines[victim]->kill();
    engines[victim]->wait();
    engines[victim].reset();
    start(victim);
    ++kills;
  }
  EXPECT_GE(counts_->operations, operations) << "the engines hang";

  // One engine survives: it must be able to reuse all its rows.
  SharingEngine survivor(directory_, "survivor");
  for (RowId row = 0; row < SharingEngine::kRows; ++row) ASSERT_TRUE(survivor.store(row, row));
  const std::uint64_t reads = counts_->reads;
  while (counts_->reads < reads + 1000 && std::chrono::steady_clock::now() < give_up)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  for (std::uint32_t i = 0; i < 2; ++i) engines[i]->kill();
  counts_->stop = true;
  for (std::uint32_t i = 0; i < kSharingEngines; ++i) {
    const int status = engines[i]->wait();
    EXPECT_TRUE(i < 2 || status == 0) << status;
    engines[i].reset();
  }
  survivor.clear_dead_readers();
  for (RowId row = 0; row < SharingEngine::kRows; ++row) EXPECT_FALSE(survivor.rows().is_pinned(row)) << row;
  for (RowId row = 0; row < SharingEngine::kRows; ++row) EXPECT_TRUE(survivor.store(row, row)) << row;
  survivor.look_around();
  EXPECT_TRUE(survivor.neighbours.empty());
  sweep_leftovers(directory_);
  EXPECT_EQ(names().size(), 1u) << "only the survivor's region may have a name";
  EXPECT_EQ(counts_->wrong, 0u);
  EXPECT_GT(counts_->reads, operations / 100) << "too few reads to find anything";
  EXPECT_GT(counts_->lent, 0u) << "no owner met a row that was being read";
  std::printf("%lu operations, %lu reads of neighbours, %lu rows in use, %u kills\n",
              counts_->operations.load(), counts_->reads.load(), counts_->lent.load(), kills);
}

TEST_F(SharedRegionsKill, a_kept_region_is_taken_over_whole_after_each_kill_while_it_is_read) {
  std::mt19937_64 random(11);
  SharingEngine reader(directory_, "reader");
  struct Pin {
    SharingEngine::Held held;
    int life;
  };
  std::vector<Pin> pins;
  std::uint64_t reads = 0, over_a_kill = 0;
  int life = 0;
  const auto release = [&](std::size_t i) {
    if (!reader.is_right(pins[i].held)) ++counts_->wrong;
    over_a_kill += pins[i].life < life ? 1 : 0;
    reader.unpin(pins[i].held);
    pins.erase(pins.begin() + static_cast<std::ptrdiff_t>(i));
  };
  const int lives = testing::rounds(kKeptLives);
  const auto give_up = std::chrono::steady_clock::now() + std::chrono::minutes(10);
  for (; life < lives; ++life) {
    const std::uint64_t seed = random(), before = counts_->operations;
    Child owner([this, life, seed] { live_kept(life, seed); });
    // A quarter is killed while it starts or a moment later.
    const std::uint64_t most = random() % 4 == 0 ? 0 : 1 + random() % kOperationsPerLife;
    std::uint64_t looks = random() % 20, round = 0;
    while ((counts_->operations < before + most || looks-- > 0) &&
           std::chrono::steady_clock::now() < give_up) {
      if (round++ % 16 == 0) reader.look_around();
      for (int i = 0; i < 8; ++i) {
        const auto found = reader.pin(static_cast<std::uint32_t>(random() % kSharedKeys));
        if (!found) continue;
        ++reads;
        if (!reader.is_right(*found)) ++counts_->wrong;
        pins.push_back({*found, life});
        if (pins.size() > 8) release(random() % pins.size());
      }
    }
    owner.kill();
    EXPECT_EQ(owner.wait(), SIGKILL) << "life " << life << " ended by itself";
  }
  const auto last = kept_engine(life);
  check_taken_over(*last);
  while (!pins.empty()) release(0);
  for (RowId row = 0; row < SharingEngine::kRows; ++row) EXPECT_TRUE(last->store(row, row)) << row;
  reader.look_around();
  reader.look_around();
  EXPECT_TRUE(reader.pin(7));
  EXPECT_EQ(counts_->wrong, 0u);
  EXPECT_EQ(counts_->lost, 0u);
  EXPECT_GT(counts_->taken_over, 0u);
  EXPECT_GT(reads, 100u) << "too few reads to find anything";
  EXPECT_GT(over_a_kill, 0u) << "no row was read while another engine took it over";
  EXPECT_EQ(names().size(), 3u) << "one name of the reader, and two of the kept region";
  std::printf("%d kills, %lu reads, %lu over a kill, %lu rows in use, %lu rows taken over\n", lives, reads,
              over_a_kill, counts_->lent.load(), counts_->taken_over.load());
}

}  // namespace
}  // namespace kv_offload
