// SPDX-License-Identifier: Apache-2.0
#include "base/clock.h"

#include <gtest/gtest.h>

#include <thread>

#include "base/thread_annotations.h"

namespace kv_offload {
namespace {

TEST(Clock, fake_clock_changes_only_when_advanced) {
  FakeClock clock;
  const Nanos start = clock.now();
  EXPECT_EQ(clock.now(), start);
  clock.advance(std::chrono::milliseconds(1500));
  EXPECT_DOUBLE_EQ(to_seconds(clock.now() - start), 1.5);
}

TEST(Clock, steady_clock_never_decreases) {
  const SteadyClock clock;
  const Nanos first = clock.now();
  EXPECT_LE(first, clock.now());
}

TEST(CondVar, notify_all_wakes_a_waiting_thread) {
  Mutex mutex;
  CondVar changed;
  bool ready = false;
  std::thread other([&] {
    const MutexLock lock(mutex);
    ready = true;
    changed.notify_all();
  });
  {
    const MutexLock lock(mutex);
    while (!ready) changed.wait(mutex);
  }
  other.join();
  EXPECT_TRUE(ready);
}

}  // namespace
}  // namespace kv_offload
