// SPDX-License-Identifier: Apache-2.0
#include "tier/circuit_breaker.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace kv_offload {
namespace {

using std::chrono::seconds;
using Kind = CircuitBreaker::Kind;

class CircuitBreakerTest : public ::testing::Test {
 protected:
  CircuitBreaker::Pass pass(Kind kind = Kind::kRecord) {
    const auto given = breaker_.admit(now_, kind);
    EXPECT_TRUE(given);
    return given.value_or(CircuitBreaker::Pass{});
  }
  bool refuses() { return !breaker_.admit(now_); }

  CircuitBreaker breaker_;
  Nanos now_{seconds(100)};
};

TEST_F(CircuitBreakerTest, the_breaker_trips_after_consecutive_failures) {
  for (unsigned i = 1; i < CircuitBreaker::kFailuresToTrip; ++i) breaker_.failed(pass(), now_);
  breaker_.succeeded(pass());
  for (unsigned i = 1; i < CircuitBreaker::kFailuresToTrip; ++i) breaker_.failed(pass(), now_);
  EXPECT_TRUE(breaker_.closed());
  breaker_.failed(pass(), now_);
  EXPECT_FALSE(breaker_.closed());
  EXPECT_TRUE(refuses());
  EXPECT_EQ(breaker_.trips(), 1u);
}

TEST_F(CircuitBreakerTest, one_probe_is_admitted_after_the_cool_down_and_closes_the_breaker) {
  breaker_.trip(now_);
  EXPECT_TRUE(refuses());
  EXPECT_FALSE(breaker_.offers(now_));
  now_ += CircuitBreaker::kFirstCoolDown;
  EXPECT_TRUE(breaker_.offers(now_));
  const CircuitBreaker::Pass probe = pass();
  EXPECT_TRUE(refuses()) << "one at a time";
  breaker_.succeeded(probe);
  EXPECT_TRUE(breaker_.closed());
  pass();
  EXPECT_TRUE(breaker_.admit(now_)) << "any number";
}

TEST_F(CircuitBreakerTest, a_failed_probe_doubles_the_cool_down_up_to_a_minute) {
  breaker_.trip(now_);
  for (Nanos rest = CircuitBreaker::kFirstCoolDown; rest < seconds(64); rest *= 2) {
    now_ += std::min(rest, CircuitBreaker::kLastCoolDown) - Nanos(1);
    EXPECT_TRUE(refuses()) << to_seconds(rest);
    now_ += Nanos(1);
    breaker_.failed(pass(), now_);
  }
  now_ += CircuitBreaker::kLastCoolDown;
  breaker_.succeeded(pass());
  breaker_.trip(now_);
  now_ += CircuitBreaker::kFirstCoolDown;
  EXPECT_FALSE(refuses()) << "from the first cool-down again";
}

TEST_F(CircuitBreakerTest, a_probe_that_was_not_tried_allows_another_probe) {
  breaker_.trip(now_);
  now_ += CircuitBreaker::kFirstCoolDown;
  breaker_.withdraw(pass());
  breaker_.succeeded(pass());
  EXPECT_TRUE(breaker_.closed());
}

TEST_F(CircuitBreakerTest, while_a_probe_runs_the_ends_of_older_ops_change_nothing) {
  const CircuitBreaker::Pass queued = pass(), running = pass(), failing = pass();
  breaker_.trip(now_);
  now_ += CircuitBreaker::kFirstCoolDown;
  const CircuitBreaker::Pass probe = pass();
  breaker_.withdraw(queued);
  EXPECT_TRUE(refuses()) << "the probe's slot was given to a second one";
  breaker_.succeeded(running);
  EXPECT_FALSE(breaker_.closed());
  breaker_.failed(failing, now_);
  EXPECT_EQ(breaker_.trips(), 1u);
  breaker_.succeeded(probe);
  EXPECT_TRUE(breaker_.closed());
}

TEST_F(CircuitBreakerTest, a_stuck_probe_that_ends_later_changes_nothing) {
  breaker_.trip(now_);
  now_ += CircuitBreaker::kFirstCoolDown;
  const CircuitBreaker::Pass stuck = pass();
  now_ += seconds(10);
  breaker_.trip(now_);
  EXPECT_EQ(breaker_.trips(), 2u);
  now_ += 2 * CircuitBreaker::kFirstCoolDown;
  const CircuitBreaker::Pass probe = pass();
  breaker_.succeeded(stuck);
  EXPECT_FALSE(breaker_.closed());
  breaker_.failed(stuck, now_);
  breaker_.withdraw(stuck);
  EXPECT_TRUE(refuses());
  breaker_.succeeded(probe);
  EXPECT_TRUE(breaker_.closed());
}

TEST_F(CircuitBreakerTest, failures_before_opening_do_not_count_after_closing) {
  std::vector<CircuitBreaker::Pass> old;
  for (unsigned i = 0; i < CircuitBreaker::kFailuresToTrip; ++i) old.push_back(pass());
  breaker_.trip(now_);
  now_ += CircuitBreaker::kFirstCoolDown;
  breaker_.succeeded(pass());
  for (const CircuitBreaker::Pass& late : old) breaker_.failed(late, now_);
  EXPECT_TRUE(breaker_.closed());
}

// ---- lookups

TEST_F(CircuitBreakerTest, only_consecutive_lookup_failures_trip_the_breaker) {
  for (int run = 0; run < 3; ++run) {
    for (unsigned i = 1; i < CircuitBreaker::kFailuresToTrip; ++i) breaker_.failed(pass(Kind::kLookup), now_);
    breaker_.succeeded(pass(Kind::kLookup));
  }
  EXPECT_TRUE(breaker_.closed());
  for (unsigned i = 0; i < CircuitBreaker::kFailuresToTrip; ++i) breaker_.failed(pass(Kind::kLookup), now_);
  EXPECT_FALSE(breaker_.closed());
}

TEST_F(CircuitBreakerTest, lookups_and_transfers_fail_separately_and_a_transfer_success_clears_both) {
  for (unsigned i = 1; i < CircuitBreaker::kFailuresToTrip; ++i) {
    breaker_.failed(pass(Kind::kLookup), now_);
    breaker_.failed(pass(), now_);
    breaker_.succeeded(pass(Kind::kLookup));
  }
  EXPECT_TRUE(breaker_.closed()) << "two runs of failures, and neither is long enough";
  for (unsigned i = 1; i < CircuitBreaker::kFailuresToTrip; ++i) breaker_.failed(pass(Kind::kLookup), now_);
  breaker_.succeeded(pass());
  breaker_.failed(pass(Kind::kLookup), now_);
  breaker_.failed(pass(), now_);
  EXPECT_TRUE(breaker_.closed());
  for (unsigned i = 1; i < CircuitBreaker::kFailuresToTrip; ++i) {
    breaker_.succeeded(pass(Kind::kLookup));
    breaker_.failed(pass(), now_);
  }
  EXPECT_FALSE(breaker_.closed()) << "a lookup does not end a run of failed transfers";
}

TEST_F(CircuitBreakerTest, a_successful_lookup_ends_a_cool_down_that_lookups_began_and_no_other) {
  const auto rest = [&](Kind because_of) {
    for (unsigned i = 0; i < CircuitBreaker::kFailuresToTrip; ++i) breaker_.failed(pass(because_of), now_);
    EXPECT_FALSE(breaker_.closed());
    now_ += CircuitBreaker::kLastCoolDown;
  };
  rest(Kind::kLookup);
  breaker_.succeeded(pass(Kind::kLookup));
  EXPECT_TRUE(breaker_.closed());

  rest(Kind::kRecord);
  breaker_.succeeded(pass(Kind::kLookup));
  EXPECT_FALSE(breaker_.closed());
  breaker_.failed(pass(Kind::kLookup), now_);  // does not clear the record's failures
  now_ += CircuitBreaker::kLastCoolDown;
  breaker_.succeeded(pass(Kind::kLookup));
  EXPECT_FALSE(breaker_.closed());
  breaker_.succeeded(pass());
  EXPECT_TRUE(breaker_.closed());

  rest(Kind::kLookup);
  breaker_.failed(pass(), now_);  // a record made this attempt
  now_ += CircuitBreaker::kLastCoolDown;
  breaker_.succeeded(pass(Kind::kLookup));
  EXPECT_FALSE(breaker_.closed());
}

TEST_F(CircuitBreakerTest, a_successful_lookup_does_not_end_the_cool_down_of_a_stuck_device) {
  breaker_.trip(now_);
  now_ += CircuitBreaker::kFirstCoolDown;
  breaker_.succeeded(pass(Kind::kLookup));
  EXPECT_FALSE(breaker_.closed());
}

TEST_F(CircuitBreakerTest,
       a_successful_lookup_does_not_enable_a_device_that_got_stuck_in_a_lookup_cool_down) {
  for (unsigned i = 0; i < CircuitBreaker::kFailuresToTrip; ++i) breaker_.failed(pass(Kind::kLookup), now_);
  breaker_.trip(now_);
  EXPECT_EQ(breaker_.trips(), 1u);
  now_ += CircuitBreaker::kFirstCoolDown;
  breaker_.succeeded(pass(Kind::kLookup));
  EXPECT_FALSE(breaker_.closed());
  breaker_.succeeded(pass());
  EXPECT_TRUE(breaker_.closed());
}

// A waiting request looks up records in every step: with one shared probe, a transfer would never get it.
TEST_F(CircuitBreakerTest, lookups_and_transfers_have_a_probe_each) {
  breaker_.trip(now_);
  now_ += CircuitBreaker::kFirstCoolDown;
  const CircuitBreaker::Pass lookup = pass(Kind::kLookup), record = pass();
  EXPECT_FALSE(breaker_.admit(now_, Kind::kLookup));
  EXPECT_FALSE(breaker_.admit(now_));
  breaker_.succeeded(lookup);
  EXPECT_FALSE(breaker_.admit(now_)) << "the record's probe has not ended";
  pass(Kind::kLookup);
  breaker_.succeeded(record);
  EXPECT_TRUE(breaker_.closed());
}

// A successful transfer proves that the device works even while lookups fail.
TEST_F(CircuitBreakerTest, a_failed_lookup_does_not_cancel_the_success_of_a_concurrent_transfer) {
  breaker_.trip(now_);
  now_ += CircuitBreaker::kFirstCoolDown;
  const CircuitBreaker::Pass lookup = pass(Kind::kLookup), record = pass();
  breaker_.failed(lookup, now_);
  breaker_.succeeded(record);
  EXPECT_TRUE(breaker_.closed());
}

// One probe of each kind at a time: each may be stuck, and then holds a thread.
TEST_F(CircuitBreakerTest, a_failed_lookup_admits_no_second_transfer_while_a_transfer_probe_runs) {
  breaker_.trip(now_);
  now_ += CircuitBreaker::kFirstCoolDown;
  const CircuitBreaker::Pass lookup = pass(Kind::kLookup);
  pass();
  breaker_.failed(lookup, now_);
  now_ += CircuitBreaker::kLastCoolDown;
  EXPECT_FALSE(breaker_.admit(now_)) << "the record's probe has not ended";
}

}  // namespace
}  // namespace kv_offload
