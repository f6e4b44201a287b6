// SPDX-License-Identifier: Apache-2.0
#include "policy/reuse_sampler.h"

#include <gtest/gtest.h>

#include "step_watch.h"

namespace kv_offload {
namespace {

ChunkId chunk_id(std::uint64_t n) { return n * 0xD6E8FEB86659FD93ull | 1; }

class ReuseSamplerTest : public testing::Test {
 protected:
  ReusePredictor predictor_;
  RequestClasses classes_;
  ReuseSampler sampler_{predictor_, classes_};
  void learn() {
    for (unsigned c = 0; c < ReusePredictor::kClasses; ++c) predictor_.learn(1);
  }
  static constexpr unsigned of_kind(bool end, bool used) {
    return ReusePredictor::class_of(RequestClasses::kUnknown, end, used);
  }
  static constexpr unsigned kClass = ReusePredictor::class_of(RequestClasses::kUnknown, false, false);
};

TEST_F(ReuseSamplerTest, a_reuse_is_learnt_at_its_age) {
  for (std::uint64_t n = 0; n < 500; ++n) sampler_.used(chunk_id(n), {});
  sampler_.advance(1000, 100000);
  for (std::uint64_t n = 0; n < 500; ++n) sampler_.used(chunk_id(n), {.now = 1000});
  learn();
  const unsigned at = ReusePredictor::bucket_of(1000);
  EXPECT_GT(predictor_.worth(kClass, at), 5 * predictor_.worth(kClass, at + 1));
}

TEST_F(ReuseSamplerTest, uses_of_a_branched_chunk_are_not_learnt) {
  const float before = predictor_.worth(kClass, 0);
  for (std::uint64_t time = 0; time < 500; ++time)
    sampler_.used(chunk_id(1), {.now = time, .branched = true});
  learn();
  EXPECT_EQ(predictor_.worth(kClass, 0), before);
}

TEST_F(ReuseSamplerTest, a_renewed_chunk_is_no_reuse) {
  const float before = predictor_.worth(kClass, 0);
  for (std::uint64_t time = 0; time < 500; ++time) sampler_.renewed(chunk_id(1), {.now = time});
  learn();
  EXPECT_EQ(predictor_.worth(kClass, 0), before);
}

TEST_F(ReuseSamplerTest, a_reuse_counts_for_the_previous_kind_of_the_chunk) {
  for (std::uint64_t n = 0; n < 500; ++n) sampler_.used(chunk_id(n), {.end = true});
  sampler_.advance(1000, 100000);
  for (std::uint64_t n = 0; n < 500; ++n) sampler_.used(chunk_id(n), {.now = 1000, .used = true});
  sampler_.advance(3000, 100000);
  learn();
  const unsigned at = ReusePredictor::bucket_of(1000);
  EXPECT_GT(predictor_.worth(of_kind(true, false), at), 5 * predictor_.worth(of_kind(false, true), at));
}

TEST_F(ReuseSamplerTest, a_chunk_extended_by_its_own_request_is_no_end) {
  const auto record = classes_.refer(5), later = classes_.refer(6);
  const unsigned of_request = classes_.class_of(record);
  for (std::uint64_t n = 0; n < 500; ++n) {
    sampler_.used(chunk_id(n), {.record = record, .end = true});
    sampler_.extended(chunk_id(n), n % 2 == 0 ? record : later);
  }
  sampler_.advance(1000, 100000);
  // Only chunks that their own request did not extend are reused. If all chunks were one kind, their worth
  // would be equal.
  for (std::uint64_t n = 1; n < 500; n += 2) sampler_.used(chunk_id(n), {.record = later, .now = 1000});
  learn();
  const unsigned at = ReusePredictor::bucket_of(1000);
  EXPECT_GT(predictor_.worth(ReusePredictor::class_of(of_request, true, false), at),
            2 * predictor_.worth(ReusePredictor::class_of(of_request, false, false), at));
}

TEST_F(ReuseSamplerTest, samples_beyond_the_horizon_are_dropped) {
  for (std::uint64_t n = 0; n < 100; ++n) sampler_.used(chunk_id(n), {.now = n});
  sampler_.advance(149, 99);
  EXPECT_EQ(sampler_.size(), 50u);
  EXPECT_FALSE(sampler_.is_tracked(chunk_id(49)));
  EXPECT_TRUE(sampler_.is_tracked(chunk_id(50)));
}

// The horizon shrinks at once, as when the cache is emptied.
TEST_F(ReuseSamplerTest, a_call_drops_only_a_few_samples) {
  for (std::uint64_t n = 0; n < 10000; ++n) sampler_.used(chunk_id(n), {.now = n});
  sampler_.advance(20000, 100);
  EXPECT_GT(sampler_.size(), 9900u);
  for (int call = 0; call < 1000; ++call) sampler_.advance(20000, 100);
  EXPECT_EQ(sampler_.size(), 0u);
}

// One in four of these ids is sampled. The hash selects the samples and also places them in the table.
TEST_F(ReuseSamplerTest, sampled_ids_spread_over_the_table) {
  constexpr std::uint64_t kUses = 5 * ReuseSampler::kMaxSamples;
  for (std::uint64_t n = 0; n < kUses; ++n) sampler_.used(chunk_id(n), {.now = n});
  int sampled = 0;
  for (std::uint64_t n = 0; n < 10000; ++n) sampled += sampler_.sampled(chunk_id(n));
  EXPECT_LT(sampled, 3500);
  EXPECT_GT(sampler_.size(), ReuseSampler::kMaxSamples / 2);
  EXPECT_LT(sampler_.longest_probe(), 150u);
}

TEST_F(ReuseSamplerTest, a_full_sampler_keeps_every_other_sample) {
  constexpr std::uint64_t kUses = 2 * ReuseSampler::kMaxSamples - 1000;
  for (std::uint64_t n = 0; n < kUses; ++n) {
    sampler_.used(chunk_id(n), {.now = n});
    if (n % 16 == 0) sampler_.advance(n, kUses);
    ASSERT_LE(sampler_.size(), ReuseSampler::kMaxSamples);
  }
  EXPECT_GT(sampler_.size(), ReuseSampler::kMaxSamples * 9 / 10);
  int early = 0, late = 0;
  for (std::uint64_t n = 0; n < 2000; ++n) {
    early += sampler_.is_tracked(chunk_id(n));
    late += sampler_.is_tracked(chunk_id(kUses - 1 - n));
  }
  EXPECT_NEAR(late, 1000, 150);
  EXPECT_NEAR(early, 1000, 150);
}

TEST_F(ReuseSamplerTest, a_sample_holds_its_request_record_until_dropped) {
  const auto record = classes_.refer(5);
  sampler_.used(chunk_id(1), {.record = record});
  classes_.release(record);
  EXPECT_EQ(classes_.size(), 1u);
  sampler_.advance(1000, 10);
  EXPECT_EQ(classes_.size(), 0u);
}

// All entries were used between two stores, so they have the same time.
TEST_F(ReuseSamplerTest, samples_of_equal_age_are_aged_a_few_per_call) {
  constexpr std::uint64_t kMany = 20000;
  for (std::uint64_t n = 0; n < kMany; ++n) sampler_.used(chunk_id(n), {.now = 1});
  std::uint64_t now = 1 + ReusePredictor::edge(1);
  std::uint64_t all = 0;
  for (std::uint64_t calls = 0; calls < kMany; ++calls) {
    const std::uint64_t steps = testing::steps_of([&] { sampler_.advance(now, 10 * kMany); });
    ASSERT_LT(steps, 5000u);
    all += steps;
  }
  EXPECT_GE(all, kMany) << "not every entry was moved to its new age";
}

}  // namespace
}  // namespace kv_offload
