// SPDX-License-Identifier: Apache-2.0
#include "hosts/sockets.h"

#include <gtest/gtest.h>
#include <poll.h>

#include <atomic>
#include <thread>

namespace kv_offload {
namespace {

bool wakes(const WakeUp& wake, int milliseconds) {
  pollfd watched{wake.get(), POLLIN, 0};
  return ::poll(&watched, 1, milliseconds) == 1;
}

TEST(WakeUpTest, a_signal_wakes_one_poll_until_the_next_signal) {
  const WakeUp wake;
  EXPECT_FALSE(wakes(wake, 0));
  for (int i = 0; i < 3; ++i) {
    wake.signal();
    wake.signal();
    EXPECT_TRUE(wakes(wake, 0));
    wake.clear();
    EXPECT_FALSE(wakes(wake, 0));
  }
}

TEST(WakeUpTest, every_signal_is_seen_by_a_thread_that_clears_before_it_looks) {
  constexpr int kSignals = 20'000;
  const WakeUp wake;
  std::atomic<int> given{0};
  std::thread giver([&] {
    for (int i = 0; i < kSignals; ++i) {
      given.fetch_add(1, std::memory_order_relaxed);
      wake.signal();
    }
  });
  int seen = 0;
  while (seen < kSignals && wakes(wake, 10'000)) {
    wake.clear();
    seen = given.load(std::memory_order_relaxed);
  }
  giver.join();
  EXPECT_EQ(seen, kSignals) << "a signal was lost";
}

}  // namespace
}  // namespace kv_offload
