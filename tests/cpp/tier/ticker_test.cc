// SPDX-License-Identifier: Apache-2.0
#include "tier/ticker.h"

#include <gtest/gtest.h>

#include <atomic>
#include <latch>
#include <new>

namespace kv_offload {
namespace {

TEST(Ticker, the_ticker_ticks_until_it_is_stopped) {
  std::latch three(3);
  std::atomic<int> ticks{0};
  Ticker ticker(std::chrono::milliseconds(1), [&] {
    if (ticks.fetch_add(1) < 3) three.count_down();
  });
  three.wait();
  ticker.stop();
  const int at_stop = ticks;
  EXPECT_GE(at_stop, 3);
  ticker.stop();
  EXPECT_EQ(ticks, at_stop);
}

TEST(Ticker, ticks_continue_after_one_that_throws) {
  std::latch three(3);
  std::atomic<int> ticks{0};
  Ticker ticker(std::chrono::milliseconds(1), [&] {
    if (ticks.fetch_add(1) < 3) three.count_down();
    throw std::bad_alloc();
  });
  three.wait();
  ticker.stop();
  EXPECT_GE(ticks, 3);
}

TEST(Ticker, stop_does_not_wait_for_the_next_tick) {
  Ticker ticker(std::chrono::hours(1), [] { FAIL() << "ticked"; });
  ticker.stop();
}

}  // namespace
}  // namespace kv_offload
