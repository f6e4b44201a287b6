// SPDX-License-Identifier: Apache-2.0
#include "record/idle_cores.h"

#include <gtest/gtest.h>

namespace kv_offload {
namespace {

struct IdleCoresTest : ::testing::Test {
  IdleCores of(std::vector<unsigned> cpus) {
    return {clock, std::move(cpus), [this] { return text; }};
  }
  FakeClock clock;
  std::string text =
      "cpu  1 1 1 1 1 1 1 1 0 0\ncpu0 100 0 0 1000 0 0 0 0 0 0\ncpu1 100 0 0 1000 50 0 0 0 0 0\n"
      "cpu10 5 5 5 5 5 5 5 5 5 5\nintr 12 cpu1\n";
};

TEST_F(IdleCoresTest, idle_cores_are_counted_since_the_last_reading) {
  IdleCores cores = of({0, 1});
  EXPECT_LT(cores.now(), 0) << "unknown so far";
  // Each CPU ran for 100 ticks. CPU 0 was busy for 75; CPU 1 waited for a disk for 50 and did nothing for 50.
  text = "cpu0 175 0 0 1025 0 0 0 0 9 9\ncpu1 100 0 0 1050 100 0 0 0 0 0\ncpu10 5 5 5 900 5 5 5 5 5 5\n";
  clock.advance(IdleCores::kReadInterval);
  EXPECT_DOUBLE_EQ(cores.now(), 1.25);
}

TEST_F(IdleCoresTest, cores_are_counted_at_most_once_per_interval) {
  IdleCores cores = of({0});
  (void)cores.now();
  text = "cpu0 100 0 0 2000 0 0 0 0 0 0\n";
  clock.advance(IdleCores::kReadInterval - Nanos{1});
  EXPECT_LT(cores.now(), 0);
  clock.advance(Nanos{1});
  EXPECT_DOUBLE_EQ(cores.now(), 1);
  text = "cpu0 1100 0 0 2000 0 0 0 0 0 0\n";
  EXPECT_DOUBLE_EQ(cores.now(), 1);
  clock.advance(IdleCores::kReadInterval);
  EXPECT_DOUBLE_EQ(cores.now(), 0);
}

TEST_F(IdleCoresTest, unreadable_statistics_are_unknown) {
  IdleCores cores = of({0});
  (void)cores.now();
  for (const char* unreadable :
       {"", "cpu0\n", "cpu0 100 0 0 1000 0 0 0 0\n", "cpu0 x\n", "cpu0 900 0 0 1 0 0 0 0\n"}) {
    text = unreadable;
    clock.advance(IdleCores::kReadInterval);
    EXPECT_LT(cores.now(), 0) << unreadable;
    text = "cpu0 100 0 0 1000 0 0 0 0 0 0\n";
    clock.advance(IdleCores::kReadInterval);
    (void)cores.now();
  }
}

TEST_F(IdleCoresTest, this_process_has_a_plausible_number_of_idle_cores) {
  IdleCores cores(clock);
  (void)cores.now();
  clock.advance(IdleCores::kReadInterval);
  EXPECT_LE(cores.now(), 4096);
}

}  // namespace
}  // namespace kv_offload
