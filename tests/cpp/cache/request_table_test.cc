// SPDX-License-Identifier: Apache-2.0
#include "cache/request_table.h"

#include <fmt/format.h>

#include "cache/parts.h"
#include "out_of_memory.h"

namespace kv_offload {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class RequestTableTest : public ::testing::Test {
 protected:
  void SetUp() override { a_ = requests_.begin({}); }
  TierIo::Read fetch(const std::string& name) {
    const TierIo::Read read{parts_.fetching(name), 0};
    parts_.ops.read({&read, 1}, Nanos(0), false);
    return read;
  }

  RequestParts parts_;
  RequestTable& requests_ = parts_.requests;
  RequestHandle a_ = 0;
};

TEST_F(RequestTableTest, every_lookup_misses_while_a_host_is_lost) {
  parts_.resident("resident");
  parts_.filling("filling", 1);
  parts_.record("recorded");
  parts_.region->set_cut_off(true);
  for (const char* name : {"resident", "filling", "recorded", "absent"})
    EXPECT_EQ(parts_.lookup(a_, name), LookupResult::kMiss) << name;
  requests_.admit(a_);
  EXPECT_EQ(parts_.missed("host_lost"), 4 * ChunkParts::kTokens);
  requests_.end_step();
  parts_.region->set_cut_off(false);
  EXPECT_EQ(parts_.lookup(a_, "resident"), LookupResult::kHit);
}

TEST_F(RequestTableTest, a_request_that_waits_for_a_store_misses_when_the_host_is_lost) {
  parts_.filling("filling", 1);
  EXPECT_EQ(parts_.lookup(a_, "filling"), LookupResult::kPending);
  requests_.end_step();
  EXPECT_EQ(parts_.lookup(a_, "filling"), LookupResult::kPending);
  requests_.end_step();
  parts_.region->set_cut_off(true);  // no time passes
  EXPECT_EQ(parts_.lookup(a_, "filling"), LookupResult::kMiss);
  requests_.admit(a_);
  EXPECT_EQ(parts_.missed("host_lost"), ChunkParts::kTokens);
  EXPECT_THAT(requests_.waiting(), IsEmpty());
}

// vLLM does not report that it schedules a preempted request again without a load.
TEST_F(RequestTableTest, a_preempted_request_begins_a_new_wait) {
  parts_.filling("filling", 1);
  requests_.set_span(a_, ChunkParts::kTokens, 4 * ChunkParts::kTokens);
  EXPECT_EQ(parts_.lookup(a_, "filling"), LookupResult::kPending);
  requests_.end_step();
  requests_.expire(a_, MissReason::kDeadline);
  EXPECT_EQ(parts_.lookup(a_, "filling"), LookupResult::kMiss);
  requests_.end_step();
  requests_.preempt(a_);
  EXPECT_EQ(parts_.missed("deadline"), 4 * ChunkParts::kTokens);
  EXPECT_FALSE(requests_.at(a_).has_span) << "it has become longer";
  EXPECT_EQ(parts_.lookup(a_, "filling"), LookupResult::kPending);
  EXPECT_THAT(requests_.waiting(), ElementsAre(a_));
}

TEST_F(RequestTableTest, a_request_that_was_looked_up_in_the_step_of_its_preemption_keeps_waiting) {
  parts_.filling("filling", 1);
  EXPECT_EQ(parts_.lookup(a_, "filling"), LookupResult::kPending);
  requests_.preempt(a_);
  EXPECT_THAT(requests_.waiting(), ElementsAre(a_));
  requests_.end_step();
  requests_.preempt(a_);
  EXPECT_THAT(requests_.waiting(), IsEmpty());
}

TEST_F(RequestTableTest, handles_are_reused_and_numbers_are_not) {
  const std::uint32_t number = requests_.at(a_).number;
  requests_.end(a_);
  EXPECT_EQ(requests_.begin({}), a_);
  EXPECT_GT(requests_.at(a_).number, number);
  EXPECT_EQ(requests_.live(), 1u);
  EXPECT_THROW(requests_.require_live(a_ + 1), InvalidArgument);
}

TEST_F(RequestTableTest, a_recorded_chunk_is_pending_and_awaits_a_plan_once) {
  parts_.record("x");
  EXPECT_EQ(parts_.lookup(a_, "x"), LookupResult::kPending);
  EXPECT_EQ(parts_.lookup(a_, "absent"), LookupResult::kMiss);
  EXPECT_TRUE(requests_.has_pending_work());
  EXPECT_THAT(requests_.take_pending(), ElementsAre(a_));
  EXPECT_THAT(requests_.take_pending(), IsEmpty());
}

TEST_F(RequestTableTest, the_oldest_request_is_planned_first_in_any_lookup_order) {
  const RequestHandle b = requests_.begin({});
  parts_.record("x");
  parts_.lookup(b, "x");
  parts_.lookup(a_, "x");
  EXPECT_THAT(requests_.take_pending(), ElementsAre(a_, b));
}

TEST_F(RequestTableTest, a_request_that_ended_or_stopped_waiting_gets_no_plan) {
  const RequestHandle b = requests_.begin({});
  parts_.record("x");
  parts_.lookup(a_, "x");
  parts_.lookup(b, "x");
  requests_.end(a_);
  requests_.expire(b, MissReason::kDeadline);
  EXPECT_THAT(requests_.take_pending(), IsEmpty());
}

TEST_F(RequestTableTest, a_hit_is_pinned_once_until_admission) {
  const Slot slot = parts_.resident("x");
  const Slot twice[] = {slot, slot};
  requests_.hold(a_, twice);
  requests_.hold(a_, twice);
  EXPECT_EQ(parts_.chunks.at(slot).pins, 1u);
  parts_.record("y");
  parts_.lookup(a_, "y");  // the request now waits
  requests_.admit(a_);
  EXPECT_EQ(parts_.chunks.at(slot).pins, 0u);
}

TEST_F(RequestTableTest, a_chunk_evicted_since_the_lookup_is_not_pinned) {
  const Slot slot = parts_.resident("x");
  parts_.chunks.discard(slot);
  requests_.hold(a_, {&slot, 1});
  EXPECT_THAT(requests_.at(a_).held, IsEmpty());
}

TEST_F(RequestTableTest, a_completed_read_is_pinned_by_all_its_waiters) {
  const RequestHandle b = requests_.begin({});
  parts_.record("x");
  const Slot slot = fetch("x").slot;
  requests_.await(a_, slot);
  requests_.await(b, slot);
  requests_.await(b, slot);
  EXPECT_EQ(requests_.at(b).fetched_for, 1u);
  parts_.finish();
  EXPECT_EQ(parts_.chunks.at(slot).pins, 2u);
  EXPECT_THAT(requests_.at(a_).awaited, IsEmpty());
  requests_.end(a_);
  EXPECT_EQ(parts_.chunks.at(slot).pins, 1u);
}

class ManyReads : public ::testing::Test {
 protected:
  static constexpr std::size_t kMany = 2 * RequestTable::kReadsCancelledPerStep + 10;

  void await_all(RequestHandle request) {
    for (const TierIo::Read& read : reads_) parts_.requests.await(request, read.slot);
  }
  void SetUp() override {
    for (std::size_t i = 0; i < kMany; ++i) {
      const std::string name = fmt::format("{}", i);
      parts_.record(name);
      reads_.push_back({parts_.fetching(name), 0});
    }
    parts_.ops.read(reads_, Nanos(0), false);
  }

  RequestParts parts_{PartsOptions{.rows = kMany}};
  std::vector<TierIo::Read> reads_;
};

TEST_F(ManyReads, reads_of_an_ended_request_are_cancelled_in_batches) {
  const RequestHandle request = parts_.requests.begin({});
  await_all(request);
  parts_.requests.end(request);
  EXPECT_EQ(parts_.tier->queued_reads(), kMany - RequestTable::kReadsCancelledPerStep);
  EXPECT_TRUE(parts_.requests.has_pending_work()) << "an idle engine must continue to step";
  parts_.ops.poll();
  EXPECT_FALSE(parts_.has("0"));
  EXPECT_EQ(parts_.chunks.at(reads_.back().slot).state, ChunkState::kFetching);
  parts_.requests.end_step();
  parts_.requests.end_step();
  EXPECT_EQ(parts_.tier->queued_reads(), 0u);
  EXPECT_FALSE(parts_.requests.has_pending_work());
}

TEST_F(ManyReads, a_reused_handle_does_not_inherit_reads) {
  const RequestHandle first = parts_.requests.begin({});
  await_all(first);
  parts_.requests.end(first);
  const RequestHandle next = parts_.requests.begin({});
  ASSERT_EQ(next, first);
  const Slot last = reads_.back().slot;
  parts_.requests.await(next, last);
  EXPECT_EQ(parts_.requests.at(next).fetched_for, 1u);
  parts_.requests.end_step();
  parts_.requests.end_step();
  EXPECT_EQ(parts_.tier->queued_reads(), 1u) << "the read is needed";
  parts_.finish();
  EXPECT_EQ(parts_.chunks.at(last).pins, 1u);
  EXPECT_THAT(parts_.requests.at(next).held, ElementsAre(last));
}

TEST_F(ManyReads, late_reads_of_an_ended_request_are_pinned_by_no_request) {
  const RequestHandle request = parts_.requests.begin({});
  await_all(request);
  parts_.requests.end(request);
  ASSERT_EQ(parts_.requests.begin({}), request);
  parts_.finish();
  EXPECT_EQ(parts_.chunks.at(reads_.back().slot).pins, 0u);
  EXPECT_THAT(parts_.requests.at(request).held, IsEmpty());
}

TEST_F(RequestTableTest, a_failed_read_is_a_miss_for_its_waiters_and_is_not_retried) {
  parts_.record("x");
  requests_.await(a_, fetch("x").slot);
  parts_.tier->fail(StatusKind::kIo);
  parts_.finish();
  EXPECT_EQ(parts_.lookup(a_, "x"), LookupResult::kMiss) << "a miss, although the tier still has the record";
  EXPECT_EQ(parts_.lookup(requests_.begin({}), "x"), LookupResult::kPending);
  requests_.end(a_);
  EXPECT_EQ(parts_.missed("io_error"), 16);
}

TEST_F(RequestTableTest, the_report_has_the_time_and_the_bytes_of_the_reads_of_a_tier) {
  parts_.record("x");
  parts_.record("y");
  parts_.lookup(a_, "x");
  const Nanos begin = parts_.clock.now();
  requests_.await(a_, fetch("x").slot);
  parts_.clock.advance(std::chrono::milliseconds(7));
  const Nanos second = parts_.clock.now();
  requests_.await(a_, fetch("y").slot);
  parts_.finish();
  const RequestReport& report = requests_.at(a_).report;
  EXPECT_EQ(report.first_lookup, begin);
  EXPECT_EQ(report.reads[0].arrived, 2u);
  EXPECT_EQ(report.reads[0].failed, 0u);
  EXPECT_EQ(report.reads[0].bytes, 2 * kPageBytes);
  EXPECT_EQ(report.reads[0].begin, begin);
  EXPECT_GE(report.reads[0].end, second);
  EXPECT_EQ(report.unfinished_reads, 0u);
}

TEST_F(RequestTableTest, the_report_has_failed_and_unfinished_reads) {
  parts_.record("x");
  parts_.record("y");
  requests_.await(a_, fetch("x").slot);
  parts_.tier->fail(StatusKind::kCorrupt);
  parts_.finish();
  requests_.await(a_, fetch("y").slot);
  requests_.end(a_);
  const RequestReport& report = requests_.at(a_).report;
  EXPECT_EQ(report.reads[0].arrived, 0u);
  EXPECT_EQ(report.reads[0].failed, 1u);
  EXPECT_EQ(report.reads[0].failure, MissReason::kCorrupt);
  EXPECT_EQ(report.reads[0].bytes, 0u);
  EXPECT_EQ(report.unfinished_reads, 1u);
}

TEST_F(RequestTableTest, the_report_has_the_start_of_the_last_pass) {
  parts_.lookup(a_, "x");
  const Nanos first = parts_.clock.now();
  requests_.end_step();
  parts_.clock.advance(std::chrono::milliseconds(3));
  parts_.lookup(a_, "x");
  EXPECT_EQ(requests_.at(a_).report.first_lookup, first);
  EXPECT_EQ(requests_.at(a_).report.last_lookup, parts_.clock.now());
}

TEST_F(RequestTableTest, an_expired_request_has_nothing_pending) {
  parts_.record("x");
  parts_.lookup(a_, "x");
  requests_.await(a_, fetch("x").slot);
  requests_.expire(a_, MissReason::kRecomputeCheaper);
  EXPECT_THAT(requests_.waiting(), IsEmpty());
  EXPECT_EQ(parts_.tier->queued_reads(), 0u) << "no request waits for the read";
  requests_.end_step();
  EXPECT_EQ(parts_.lookup(a_, "x"), LookupResult::kMiss);
  requests_.end(a_);
  EXPECT_EQ(parts_.missed("recompute_cheaper"), 16);
}

TEST_F(RequestTableTest, a_lookup_past_the_deadline_is_a_miss) {
  parts_.record("x");
  parts_.lookup(a_, "x");
  parts_.clock.advance(parts_.options.lookup_timeout);
  requests_.end_step();
  EXPECT_EQ(parts_.lookup(a_, "x"), LookupResult::kMiss);
}

// vLLM looks up a queued request in some steps only.
TEST_F(RequestTableTest, time_in_which_a_request_is_not_looked_up_is_no_wait_for_a_tier) {
  const Nanos timeout = parts_.options.lookup_timeout;
  parts_.filling("x", 1);
  EXPECT_EQ(parts_.lookup(a_, "x"), LookupResult::kPending);
  requests_.end_step();
  parts_.clock.advance(timeout / 4);
  EXPECT_EQ(parts_.lookup(a_, "x"), LookupResult::kPending);
  for (std::uint64_t i = 0; i < RequestTable::kUnaskedSteps; ++i) requests_.end_step();
  parts_.clock.advance(timeout);
  requests_.expire(a_, MissReason::kDeadline);
  EXPECT_THAT(requests_.waiting(), IsEmpty());
  requests_.end_step();
  EXPECT_EQ(parts_.lookup(a_, "x"), LookupResult::kPending);
  EXPECT_EQ(requests_.at(a_).deadline,
            parts_.clock.now() + timeout * 3 / 4 - timeout / RequestTable::kMostWaits);
  EXPECT_EQ(requests_.at(a_).report.waited_seconds, to_seconds(timeout / 4));
  requests_.end_step();
  parts_.clock.advance(timeout);
  requests_.expire(a_, MissReason::kDeadline);  // vLLM looked it up in the last step
  EXPECT_EQ(parts_.lookup(a_, "x"), LookupResult::kMiss);
  requests_.admit(a_);
  EXPECT_EQ(requests_.at(a_).waited, Nanos(0));
}

// The step in which the deadline passes has not ended, so the request has not expired yet.
TEST_F(RequestTableTest, the_wait_begins_again_at_a_lookup_right_after_the_deadline) {
  parts_.filling("x", 1);
  EXPECT_EQ(parts_.lookup(a_, "x"), LookupResult::kPending);
  for (std::uint64_t i = 0; i < RequestTable::kUnaskedSteps; ++i) requests_.end_step();
  parts_.clock.advance(parts_.options.lookup_timeout);
  EXPECT_EQ(parts_.lookup(a_, "x"), LookupResult::kPending);
  EXPECT_GT(requests_.at(a_).deadline, parts_.clock.now());
  EXPECT_THAT(requests_.waiting(), ElementsAre(a_));
}

// vLLM looks up the first queued request in each step.
TEST_F(RequestTableTest, time_in_which_nothing_is_pending_is_no_wait_for_a_tier) {
  parts_.record("x");
  parts_.resident("y");
  EXPECT_EQ(parts_.lookup(a_, "x"), LookupResult::kPending);
  requests_.end_step();
  EXPECT_EQ(parts_.lookup(a_, "y"), LookupResult::kHit);
  requests_.end_step();
  parts_.clock.advance(parts_.options.lookup_timeout);
  requests_.expire(a_, MissReason::kDeadline);
  EXPECT_EQ(parts_.lookup(a_, "x"), LookupResult::kPending) << "it was evicted meanwhile";
  requests_.end_step();
  parts_.clock.advance(parts_.options.lookup_timeout);
  EXPECT_EQ(parts_.lookup(a_, "x"), LookupResult::kMiss);
  requests_.end_step();
  EXPECT_EQ(parts_.lookup(a_, "x"), LookupResult::kMiss) << "the timeout is used up";
}

TEST_F(RequestTableTest, a_decision_from_before_a_long_time_in_a_queue_is_made_again) {
  parts_.record("x");
  EXPECT_EQ(parts_.lookup(a_, "x"), LookupResult::kPending);
  requests_.close_all(a_, MissReason::kPressure);
  for (std::uint64_t i = 0; i < RequestTable::kUnaskedSteps; ++i) requests_.end_step();
  parts_.clock.advance(parts_.options.lookup_timeout / 2);
  EXPECT_EQ(parts_.lookup(a_, "x"), LookupResult::kMiss) << "before its deadline";
  requests_.expire(a_, MissReason::kRecomputeCheaper);
  for (std::uint64_t i = 0; i < RequestTable::kUnaskedSteps; ++i) requests_.end_step();
  parts_.clock.advance(parts_.options.lookup_timeout / 2);
  EXPECT_EQ(parts_.lookup(a_, "x"), LookupResult::kPending);
}

TEST_F(RequestTableTest, a_short_time_in_which_a_request_is_not_looked_up_counts) {
  parts_.filling("x", 1);
  EXPECT_EQ(parts_.lookup(a_, "x"), LookupResult::kPending);
  requests_.end_step();
  parts_.clock.advance(parts_.options.lookup_timeout * 3 / 4);
  EXPECT_EQ(parts_.lookup(a_, "x"), LookupResult::kPending);
  for (std::uint64_t i = 0; i < RequestTable::kUnaskedSteps; ++i) requests_.end_step();
  parts_.clock.advance(parts_.options.lookup_timeout / 4 - Nanos(1));
  requests_.expire(a_, MissReason::kDeadline);
  EXPECT_EQ(parts_.lookup(a_, "x"), LookupResult::kMiss);
}

// As in an engine whose steps are often full.
TEST_F(RequestTableTest, a_request_that_vllm_looks_up_in_every_second_step_waits_for_one_timeout) {
  const Nanos timeout = parts_.options.lookup_timeout, step = timeout / 16;
  parts_.filling("x", 1);
  Nanos pending{0};
  for (int i = 0; i < 64; ++i) {
    if (parts_.lookup(a_, "x") == LookupResult::kPending) pending += step;
    requests_.end_step();
    requests_.end_step();
    parts_.clock.advance(step);
    if (requests_.at(a_).waiting && parts_.clock.now() >= requests_.at(a_).deadline)
      requests_.expire(a_, MissReason::kDeadline);
  }
  EXPECT_EQ(pending, timeout);
}

TEST_F(RequestTableTest, a_request_that_vllm_seldom_looks_up_waits_a_limited_number_of_times) {
  parts_.filling("x", 1);
  int waits = 0;
  while (parts_.lookup(a_, "x") == LookupResult::kPending && waits <= RequestTable::kMostWaits) {
    ++waits;
    for (std::uint64_t i = 0; i < RequestTable::kUnaskedSteps; ++i) requests_.end_step();
    parts_.clock.advance(parts_.options.lookup_timeout);
    requests_.expire(a_, MissReason::kDeadline);
  }
  EXPECT_EQ(waits, RequestTable::kMostWaits);
}

TEST_F(RequestTableTest, a_closed_group_is_a_miss_with_its_reason) {
  parts_.record("x");
  requests_.close_group(a_, 0, MissReason::kPressure);
  EXPECT_EQ(parts_.lookup(a_, "x"), LookupResult::kMiss);
  requests_.end(a_);
  EXPECT_EQ(parts_.missed("pressure"), 16);
}

TEST_F(RequestTableTest, misses_of_the_last_pass_are_counted_once_at_admission) {
  parts_.lookup(a_, "x");
  requests_.end_step();
  parts_.lookup(a_, "x");
  EXPECT_EQ(parts_.missed("not_stored"), 0);
  requests_.admit(a_);
  requests_.admit(a_);
  requests_.end(a_);
  EXPECT_EQ(parts_.missed("not_stored"), 16);
}

TEST_F(RequestTableTest, a_lookup_that_finds_no_memory_is_not_counted) {
  const auto admit = [&] {
    requests_.admit(a_);
    requests_.end_step();
  };
  const unsigned failures = testing::fail_each_allocation([&] { parts_.lookup(a_, "absent"); },
                                                          [&] {
                                                            admit();
                                                            EXPECT_EQ(parts_.missed("not_stored"), 0);
                                                          });
  EXPECT_GE(failures, 2u);
  admit();
  EXPECT_EQ(parts_.missed("not_stored"), ChunkParts::kTokens);
}

TEST_F(RequestTableTest, parts_of_a_chunk_are_not_misses) {
  requests_.set_span(a_, 16, 160);
  parts_.lookup(a_, "x");
  for (const char* part : {"y", "z"}) requests_.lookup(a_, key_of(part), 4);
  requests_.admit(a_);
  EXPECT_EQ(parts_.missed("not_stored"), 160);
}

TEST_F(RequestTableTest, abandoned_probes_are_not_awaited) {
  parts_.record("x");
  parts_.record("y");
  const Slot x = fetch("x").slot, y = fetch("y").slot;
  requests_.await(a_, x);
  requests_.await(a_, y);
  requests_.continue_as_probes(a_, 1, Nanos(0));
  EXPECT_THAT(requests_.at(a_).awaited, ElementsAre(::testing::Pair(::testing::_, y)));
  EXPECT_TRUE(parts_.ops.is_probe(x));
}

}  // namespace
}  // namespace kv_offload
