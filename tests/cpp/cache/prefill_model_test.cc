// SPDX-License-Identifier: Apache-2.0
#include "cache/prefill_model.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

namespace kv_offload {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// An engine whose step times follow the law that the model fits.
class PrefillModelTest : public ::testing::Test {
 protected:
  double base_ = 0.004, per_token_ = 50e-6, per_context_ = 5e-9, noise_ = 0;

  double law(double tokens, double context) {
    const double exact = base_ + tokens * (per_token_ + per_context_ * context);
    return exact * (1 + noise_ * (static_cast<double>(random_() % 2001) / 1000 - 1));
  }
  // Runs a prompt in steps of 2,048 tokens, then some steps that compute nothing.
  void serve(double prompt, int idle_steps = 5) {
    for (double at = 0; at < prompt; at += 2048) {
      const double tokens = std::min(2048.0, prompt - at);
      step(tokens, at + tokens / 2);
    }
    for (int i = 0; i < idle_steps; ++i) step(0, 0);
  }
  void step(double tokens, double context) {
    if (tokens > 0) model_.observe(tokens, context);
    model_.end_step(now_);
    now_ += Nanos(static_cast<std::int64_t>(1e9 * law(tokens, context)));
  }
  void one_step(double tokens, double context, double seconds) {
    model_.observe(tokens, context);
    model_.end_step(now_);
    now_ += Nanos(static_cast<std::int64_t>(1e9 * seconds));
    for (int i = 0; i < 3; ++i) model_.end_step(now_);
  }
  double exact(double prompt) {
    return std::ceil(prompt / 2048) * base_ + prompt * (per_token_ + per_context_ * prompt / 2);
  }
  void expect_right(double tolerance) {
    for (const double prompt : {512.0, 2048.0, 8192.0, 32768.0}) {
      EXPECT_NEAR(model_.seconds(prompt, 0), exact(prompt), tolerance * exact(prompt)) << prompt;
    }
  }

  std::mt19937 random_{1};
  PrefillModel model_;
  Nanos now_{seconds(100)};
};

TEST_F(PrefillModelTest, nothing_is_known_before_the_first_step) {
  EXPECT_FALSE(model_.known());
  EXPECT_EQ(model_.seconds(1000, 0), 0);
}

TEST_F(PrefillModelTest, one_prompt_determines_the_speed) {
  serve(2000);
  EXPECT_NEAR(model_.seconds(2000, 0), exact(2000), 0.05 * exact(2000));
}

TEST_F(PrefillModelTest, several_prompt_lengths_determine_the_model) {
  for (const double prompt : {600.0, 4000.0, 20000.0, 1200.0, 9000.0}) serve(prompt);
  expect_right(0.1);
  EXPECT_GT(model_.tokens_per_second(1024), 1.5 * model_.tokens_per_second(65536));
}

TEST_F(PrefillModelTest, the_model_is_fitted_despite_noise) {
  noise_ = 0.2;
  for (int i = 0; i < 10; ++i) {
    for (const double prompt : {600.0, 4000.0, 20000.0, 1200.0, 9000.0}) serve(prompt);
  }
  expect_right(0.2);
}

TEST_F(PrefillModelTest, tokens_after_a_long_prefix_take_longer) {
  for (const double prompt : {600.0, 4000.0, 20000.0}) serve(prompt);
  EXPECT_GT(model_.seconds(1000, 50000), 3 * model_.seconds(1000, 0));
}

TEST_F(PrefillModelTest, predicted_seconds_are_never_negative) {
  for (int i = 0; i < 8; ++i) {  // steps after long prefixes, fast by chance
    one_step(2000, 1000, 0.2);
    one_step(2000, 10000, 0.1);
  }
  EXPECT_GT(model_.seconds(1000, 100000), 0);
}

TEST_F(PrefillModelTest, similar_prefix_lengths_add_no_prefix_cost) {
  for (int i = 0; i < 8; ++i) {
    one_step(2000, 1000, 0.2);
    one_step(2000, 1005, 0.201);
  }
  EXPECT_NEAR(model_.seconds(2000, 50000), 0.2, 0.02);
}

TEST_F(PrefillModelTest, a_change_of_speed_is_followed) {
  for (int i = 0; i < 20; ++i) serve(4000);
  per_token_ *= 3;
  for (int i = 0; i < 60; ++i) serve(4000);
  EXPECT_NEAR(model_.seconds(4000, 0), exact(4000), 0.1 * exact(4000));
}

TEST_F(PrefillModelTest, idle_time_does_not_change_the_model) {
  serve(2000);
  const double before = model_.seconds(1000, 0);
  for (int i = 0; i < 20; ++i) {
    const Nanos idle_since = now_;
    now_ += seconds(3);
    model_.on_idle(idle_since, now_);
    serve(2000, 1);
  }
  EXPECT_NEAR(model_.seconds(1000, 0), before, 0.1 * before);
}

TEST_F(PrefillModelTest, a_prompt_before_idle_time_is_learnt_afterwards) {
  model_.observe(2000, 1000);
  model_.end_step(now_);
  now_ += milliseconds(200);
  EXPECT_FALSE(model_.known());
  model_.on_idle(now_, now_ + seconds(5));
  EXPECT_NEAR(model_.seconds(2000, 0), 0.2, 0.02);
}

TEST_F(PrefillModelTest, a_hung_step_does_not_change_the_model) {
  serve(2000);
  const double before = model_.seconds(1000, 0);
  model_.observe(2000, 1000);
  model_.end_step(now_);
  now_ += seconds(60);
  for (int i = 0; i < 3; ++i) model_.end_step(now_);
  EXPECT_NEAR(model_.seconds(1000, 0), before, 1e-9);
}

}  // namespace
}  // namespace kv_offload
