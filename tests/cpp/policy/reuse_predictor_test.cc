// SPDX-License-Identifier: Apache-2.0
#include "policy/reuse_predictor.h"

#include <gtest/gtest.h>

namespace kv_offload {
namespace {

TEST(ReusePredictor, buckets_begin_at_their_edges) {
  EXPECT_EQ(ReusePredictor::bucket_of(0), 0u);
  EXPECT_EQ(ReusePredictor::bucket_of(63), 0u);
  for (unsigned b = 1; b < ReusePredictor::kBuckets; ++b) {
    EXPECT_EQ(ReusePredictor::bucket_of(ReusePredictor::edge(b)), b);
    EXPECT_EQ(ReusePredictor::bucket_of(ReusePredictor::edge(b) - 1), b - 1);
  }
  EXPECT_EQ(ReusePredictor::bucket_of(~std::uint64_t{0}), ReusePredictor::kBuckets - 1);
}

TEST(ReusePredictor, without_history_younger_entries_are_worth_more) {
  const ReusePredictor model;
  for (unsigned b = 1; b < ReusePredictor::kBuckets; ++b) EXPECT_LE(model.worth(3, b), model.worth(3, b - 1));
  EXPECT_EQ(model.worth(0, 7), model.worth(5, 7));
}

TEST(ReusePredictor, a_class_with_reuse_is_worth_more) {
  ReusePredictor model;
  for (int i = 0; i < 1000; ++i) {
    for (unsigned b = 0; b <= 10; ++b) {
      model.reached(1, b);
      if (b < 10 || i % 2 == 0) model.reached(2, b);
    }
    if (i % 2 == 0) model.returned(2, 10);
  }
  for (unsigned c = 0; c < ReusePredictor::kClasses; ++c) model.learn(1);
  EXPECT_GT(model.worth(2, 0), 2 * model.worth(1, 0));
  // The worth grows as the expected reuse comes nearer.
  EXPECT_GT(model.worth(2, 9), model.worth(2, 3));
  EXPECT_LT(model.worth(2, 12), model.worth(2, 9));
}

// The ends of prompts are never reused. The model learns this from one request class and expects it of a
// class with data only for other chunks.
TEST(ReusePredictor, an_unseen_class_inherits_the_reuse_of_its_kind) {
  ReusePredictor model;
  const auto see = [&](unsigned of_class, int times, bool returns) {
    for (int i = 0; i < times; ++i) {
      for (unsigned b = 0; b <= 10; ++b) model.reached(of_class, b);
      if (returns) model.returned(of_class, 10);
    }
  };
  see(ReusePredictor::class_of(1, false, false), 1000, true);
  see(ReusePredictor::class_of(1, true, false), 1000, false);
  see(ReusePredictor::class_of(2, false, false), 1000, true);
  for (unsigned c = 0; c < ReusePredictor::kClasses; ++c) model.learn(1);
  const float other = model.worth(ReusePredictor::class_of(2, false, false), 10);
  EXPECT_LT(model.worth(ReusePredictor::class_of(2, true, false), 10), other / 4);
  // The same holds for the request class.
  see(ReusePredictor::class_of(3, false, false), 1000, false);
  for (unsigned c = 0; c < ReusePredictor::kClasses; ++c) model.learn(1);
  EXPECT_LT(model.worth(ReusePredictor::class_of(3, false, true), 10),
            model.worth(ReusePredictor::class_of(2, false, true), 10) / 4);
}

TEST(ReusePredictor, worth_decays_without_new_observations) {
  ReusePredictor model;
  for (int i = 0; i < 1000; ++i) {
    model.reached(1, 0);
    model.returned(1, 0);
  }
  for (unsigned c = 0; c < ReusePredictor::kClasses; ++c) model.learn(0.5f);
  const float before = model.worth(1, 0);
  for (unsigned c = 0; c < 20 * ReusePredictor::kClasses; ++c) model.learn(0.5f);
  EXPECT_LT(model.worth(1, 0), before / 10);
}

}  // namespace
}  // namespace kv_offload
