// SPDX-License-Identifier: Apache-2.0
// A thread that waits for the lock of the records gets it before the next piece of a long list.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <functional>
#include <thread>

#include "backends/fs/record_index.h"
#include "tier/tier_driver.h"

namespace kv_offload {
namespace {

// Reads the private member Mutex::waiting_: an explicit instantiation may name it.
unsigned threads_waiting_for(const Mutex& mutex);
template <std::atomic<unsigned> Mutex::*kWaiting>
struct WaitingThreads {
  friend unsigned threads_waiting_for(const Mutex& mutex) { return (mutex.*kWaiting).load(); }
};
template struct WaitingThreads<&Mutex::waiting_>;

// Records which thread owns each hold of one mutex. The thread with the long list keeps each hold until the
// other thread waits, so the next owner is not left to chance.
class Turns final : public Mutex::Watcher {
 public:
  Turns() { Mutex::watch(this); }
  ~Turns() override { Mutex::watch(nullptr); }
  void locked(const Mutex& mutex) override {
    if (watched_ == nullptr) watched_ = &mutex;
    if (&mutex != watched_ || !long_list_.load()) return;
    const bool is_long = std::this_thread::get_id() == owner_;
    if (is_long) {
      while (threads_waiting_for(mutex) == 0) std::this_thread::yield();
      ++pieces_;
      if (was_long_) ++in_a_row_;
    }
    was_long_ = is_long;
  }
  void unlocking(const Mutex&) override {}
  // From now on, this thread works through a long list.
  void begin() {
    pieces_ = 0;
    in_a_row_ = 0;
    was_long_ = false;
    long_list_.store(true);
  }
  void end() { long_list_.store(false); }
  int pieces() const { return pieces_; }
  int in_a_row() const { return in_a_row_; }  // holds of the long list right after another hold of it

 private:
  const std::thread::id owner_ = std::this_thread::get_id();
  const Mutex* watched_ = nullptr;
  std::atomic<bool> long_list_{false}, was_long_{false};
  std::atomic<int> pieces_{0}, in_a_row_{0};
};

TEST(LetInTest, a_waiting_thread_gets_the_lock_before_the_next_piece_of_a_long_list) {
  constexpr std::uint32_t kPieces = 20;
  constexpr auto kCount = kPieces * static_cast<std::uint32_t>(RecordIndex::kRecordsPerLock);
  FakeClock clock;
  RecordIndex records("lru", clock);
  auto epoch = std::make_shared<FsEpoch>();
  epoch->number = 1;
  ASSERT_TRUE(records.begin(epoch, *records.next(), RecordIndex::Extent::kOrder));
  std::vector<FoundRecord> found;
  auto uses = std::make_shared<std::vector<TierUse>>();
  for (std::uint32_t i = 0; i < kCount; ++i) {
    found.push_back({testing::key_of(i), 8192, 8192, 0});
    uses->push_back({found.back().key, {.request = 1}});
  }

  Turns turns;
  (void)records.bytes();  // selects this mutex
  std::atomic<bool> done{false};
  std::thread asks([&] {
    while (!done.load()) (void)records.contains(found[0].key);
  });
  const std::atomic<bool> to_the_end{false};
  std::shared_ptr<FsEpoch> of;
  const std::array<std::function<void()>, 4> long_lists{
      [&] { records.adopt_names(epoch, found, true, to_the_end); },
      [&] {
        records.used(uses);
        records.apply_uses();
      },
      [&] { EXPECT_EQ(records.take_touched(&of).size(), kCount); },
      [&] {
        std::vector<FsCatalog::Record> known;
        for (Slot next = 0; records.known_from(epoch, &next, &known);) {
        }
        EXPECT_EQ(known.size(), kCount);
      },
  };
  for (std::size_t i = 0; i < long_lists.size(); ++i) {
    turns.begin();
    long_lists[i]();
    turns.end();
    EXPECT_GE(turns.pieces(), static_cast<int>(kPieces)) << i;
    // used() is a separate call, which lets no other thread in.
    EXPECT_LE(turns.in_a_row(), i == 1 ? 1 : 0) << i;
  }
  done.store(true);
  asks.join();
}

}  // namespace
}  // namespace kv_offload
