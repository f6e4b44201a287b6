#include "storage/breaker.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace kv_offload {
namespace {

using std::chrono::seconds;
using Kind = Breaker::Kind;

class BreakerTest : public ::testing::Test {
 protected:
  Breaker::Pass pass(Kind kind = Kind::kRecord) {
    const auto given = breaker_.admit(now_, kind);
    EXPECT_TRUE(given);
    return given.value_or(Breaker::Pass{});
  }
  bool refuses() { return !breaker_.admit(now_); }

  Breaker breaker_;
  Nanos now_{seconds(100)};
};

TEST_F(BreakerTest, trips_after_failures_in_a_row) {
  for (unsigned i = 1; i < Breaker::kFailuresToTrip; ++i) breaker_.failed(pass(), now_);
  breaker_.succeeded(pass());
  for (unsigned i = 1; i < Breaker::kFailuresToTrip; ++i) breaker_.failed(pass(), now_);
  EXPECT_TRUE(breaker_.closed());
  breaker_.failed(pass(), now_);
  EXPECT_FALSE(breaker_.closed());
  EXPECT_TRUE(refuses());
  EXPECT_EQ(breaker_.trips(), 1u);
}

TEST_F(BreakerTest, lets_one_probe_through_after_its_rest_and_closes_with_its_success) {
  breaker_.trip(now_);
  EXPECT_TRUE(refuses());
  EXPECT_FALSE(breaker_.offers(now_));
  now_ += Breaker::kFirstCoolDown;
  EXPECT_TRUE(breaker_.offers(now_));
  const Breaker::Pass probe = pass();
  EXPECT_TRUE(refuses()) << "one at a time";
  breaker_.succeeded(probe);
  EXPECT_TRUE(breaker_.closed());
  pass();
  EXPECT_TRUE(breaker_.admit(now_)) << "any number";
}

TEST_F(BreakerTest, a_probe_that_fails_doubles_the_rest_up_to_a_minute) {
  breaker_.trip(now_);
  for (Nanos rest = Breaker::kFirstCoolDown; rest < seconds(64); rest *= 2) {
    now_ += std::min(rest, Breaker::kLastCoolDown) - Nanos(1);
    EXPECT_TRUE(refuses()) << to_seconds(rest);
    now_ += Nanos(1);
    breaker_.failed(pass(), now_);
  }
  now_ += Breaker::kLastCoolDown;
  breaker_.succeeded(pass());
  breaker_.trip(now_);
  now_ += Breaker::kFirstCoolDown;
  EXPECT_FALSE(refuses()) << "from the first rest again";
}

TEST_F(BreakerTest, a_probe_that_was_not_tried_leaves_its_place_to_the_next) {
  breaker_.trip(now_);
  now_ += Breaker::kFirstCoolDown;
  breaker_.not_tried(pass());
  breaker_.succeeded(pass());
  EXPECT_TRUE(breaker_.closed());
}

TEST_F(BreakerTest, while_a_probe_runs_the_ends_of_older_ops_say_nothing) {
  const Breaker::Pass queued = pass(), running = pass(), failing = pass();
  breaker_.trip(now_);
  now_ += Breaker::kFirstCoolDown;
  const Breaker::Pass probe = pass();
  breaker_.not_tried(queued);
  EXPECT_TRUE(refuses()) << "the probe's place was given to a second one";
  breaker_.succeeded(running);
  EXPECT_FALSE(breaker_.closed());
  breaker_.failed(failing, now_);
  EXPECT_EQ(breaker_.trips(), 1u);
  breaker_.succeeded(probe);
  EXPECT_TRUE(breaker_.closed());
}

TEST_F(BreakerTest, a_probe_that_was_stuck_itself_says_nothing_when_it_comes_back) {
  breaker_.trip(now_);
  now_ += Breaker::kFirstCoolDown;
  const Breaker::Pass stuck = pass();
  now_ += seconds(10);
  breaker_.trip(now_);
  EXPECT_EQ(breaker_.trips(), 2u);
  now_ += 2 * Breaker::kFirstCoolDown;
  const Breaker::Pass probe = pass();
  breaker_.succeeded(stuck);
  EXPECT_FALSE(breaker_.closed());
  breaker_.failed(stuck, now_);
  breaker_.not_tried(stuck);
  EXPECT_TRUE(refuses());
  breaker_.succeeded(probe);
  EXPECT_TRUE(breaker_.closed());
}

TEST_F(BreakerTest, failures_of_before_it_opened_do_not_count_after_it_closed) {
  std::vector<Breaker::Pass> old;
  for (unsigned i = 0; i < Breaker::kFailuresToTrip; ++i) old.push_back(pass());
  breaker_.trip(now_);
  now_ += Breaker::kFirstCoolDown;
  breaker_.succeeded(pass());
  for (const Breaker::Pass& late : old) breaker_.failed(late, now_);
  EXPECT_TRUE(breaker_.closed());
}

// ---- questions

TEST_F(BreakerTest, trips_after_questions_that_failed_in_a_row_and_not_after_as_many_among_good_ones) {
  for (int run = 0; run < 3; ++run) {
    for (unsigned i = 1; i < Breaker::kFailuresToTrip; ++i) breaker_.failed(pass(Kind::kQuestion), now_);
    breaker_.succeeded(pass(Kind::kQuestion));
  }
  EXPECT_TRUE(breaker_.closed());
  for (unsigned i = 0; i < Breaker::kFailuresToTrip; ++i) breaker_.failed(pass(Kind::kQuestion), now_);
  EXPECT_FALSE(breaker_.closed());
}

TEST_F(BreakerTest, questions_and_records_fail_apart_and_a_record_speaks_for_both) {
  for (unsigned i = 1; i < Breaker::kFailuresToTrip; ++i) {
    breaker_.failed(pass(Kind::kQuestion), now_);
    breaker_.failed(pass(), now_);
    breaker_.succeeded(pass(Kind::kQuestion));
  }
  EXPECT_TRUE(breaker_.closed()) << "a run of each, and neither long enough";
  for (unsigned i = 1; i < Breaker::kFailuresToTrip; ++i) breaker_.failed(pass(Kind::kQuestion), now_);
  breaker_.succeeded(pass());
  breaker_.failed(pass(Kind::kQuestion), now_);
  breaker_.failed(pass(), now_);
  EXPECT_TRUE(breaker_.closed());
}

TEST_F(BreakerTest, a_good_question_ends_a_rest_that_questions_began_and_no_other) {
  const auto rest = [&](Kind because_of) {
    for (unsigned i = 0; i < Breaker::kFailuresToTrip; ++i) breaker_.failed(pass(because_of), now_);
    EXPECT_FALSE(breaker_.closed());
    now_ += Breaker::kLastCoolDown;
  };
  rest(Kind::kQuestion);
  breaker_.succeeded(pass(Kind::kQuestion));
  EXPECT_TRUE(breaker_.closed());

  rest(Kind::kRecord);
  breaker_.succeeded(pass(Kind::kQuestion));
  EXPECT_FALSE(breaker_.closed());
  breaker_.failed(pass(Kind::kQuestion), now_);  // takes nothing back
  now_ += Breaker::kLastCoolDown;
  breaker_.succeeded(pass(Kind::kQuestion));
  EXPECT_FALSE(breaker_.closed());
  breaker_.succeeded(pass());
  EXPECT_TRUE(breaker_.closed());

  rest(Kind::kQuestion);
  breaker_.failed(pass(), now_);  // the try was a record's
  now_ += Breaker::kLastCoolDown;
  breaker_.succeeded(pass(Kind::kQuestion));
  EXPECT_FALSE(breaker_.closed());
}

TEST_F(BreakerTest, a_good_question_does_not_end_the_rest_of_a_device_that_was_stuck) {
  breaker_.trip(now_);
  now_ += Breaker::kFirstCoolDown;
  breaker_.succeeded(pass(Kind::kQuestion));
  EXPECT_FALSE(breaker_.closed());
}

TEST_F(BreakerTest, a_device_that_gets_stuck_in_a_rest_that_questions_began_is_not_on_again_by_a_question) {
  for (unsigned i = 0; i < Breaker::kFailuresToTrip; ++i) breaker_.failed(pass(Kind::kQuestion), now_);
  breaker_.trip(now_);
  EXPECT_EQ(breaker_.trips(), 1u);
  now_ += Breaker::kFirstCoolDown;
  breaker_.succeeded(pass(Kind::kQuestion));
  EXPECT_FALSE(breaker_.closed());
  breaker_.succeeded(pass());
  EXPECT_TRUE(breaker_.closed());
}

// Who waits for records asks in every step: a record would never get the only try.
TEST_F(BreakerTest, questions_and_records_have_a_probe_each) {
  breaker_.trip(now_);
  now_ += Breaker::kFirstCoolDown;
  const Breaker::Pass question = pass(Kind::kQuestion), record = pass();
  EXPECT_FALSE(breaker_.admit(now_, Kind::kQuestion));
  EXPECT_FALSE(breaker_.admit(now_));
  breaker_.succeeded(question);
  EXPECT_FALSE(breaker_.admit(now_)) << "the record's probe is out still";
  pass(Kind::kQuestion);
  breaker_.succeeded(record);
  EXPECT_TRUE(breaker_.closed());
}

// A record that is moved while questions fail says all that a record can say.
TEST_F(BreakerTest, a_question_that_fails_takes_nothing_back_that_a_record_says_beside_it) {
  breaker_.trip(now_);
  now_ += Breaker::kFirstCoolDown;
  const Breaker::Pass question = pass(Kind::kQuestion), record = pass();
  breaker_.failed(question, now_);
  breaker_.succeeded(record);
  EXPECT_TRUE(breaker_.closed());
}

// One try of a kind at a time: each may be stuck, and holds a thread.
TEST_F(BreakerTest, a_question_that_fails_lets_no_second_record_through_beside_a_probe_that_has_not_ended) {
  breaker_.trip(now_);
  now_ += Breaker::kFirstCoolDown;
  const Breaker::Pass question = pass(Kind::kQuestion);
  pass();
  breaker_.failed(question, now_);
  now_ += Breaker::kLastCoolDown;
  EXPECT_FALSE(breaker_.admit(now_)) << "the record's probe is out still";
}

}  // namespace
}  // namespace kv_offload
