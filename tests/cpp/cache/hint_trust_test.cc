// SPDX-License-Identifier: Apache-2.0
#include "cache/hint_trust.h"

#include <gtest/gtest.h>

#include <limits>
#include <random>

namespace kv_offload {
namespace {

class HintTrustTest : public ::testing::Test {
 protected:
  // Observes returns after random times. `expected`: the hint for an actual time.
  template <typename Hint>
  bool trusts_after(int returns, Hint expected) {
    for (int i = 0; i < returns; ++i) {
      const double actual = gap();
      trust_.observe(expected(actual), actual);
    }
    return trust_.is_trusted();
  }
  double gap() { return std::exponential_distribution<>(1 / 60.0)(random_); }

  std::mt19937 random_{1};
  HintTrust trust_;
};

TEST_F(HintTrustTest, exact_hints_are_trusted) {
  EXPECT_TRUE(trusts_after(300, [](double actual) { return actual; }));
}

TEST_F(HintTrustTest, hints_are_trusted_until_there_is_data) {
  EXPECT_TRUE(trusts_after(3, [](double actual) { return -actual; }));
}

TEST_F(HintTrustTest, hints_that_are_all_too_late_are_trusted) {
  EXPECT_TRUE(trusts_after(300, [](double actual) { return 10 * actual + 60; }));
}

TEST_F(HintTrustTest, one_bit_is_trusted_and_its_opposite_is_not) {
  EXPECT_TRUE(trusts_after(300, [](double actual) { return actual <= 30 ? 30 : 300; }));
  EXPECT_FALSE(trusts_after(300, [](double actual) { return actual <= 30 ? 300 : 30; }));
}

TEST_F(HintTrustTest, random_hints_are_not_trusted_and_better_ones_are_trusted_again) {
  EXPECT_FALSE(trusts_after(300, [this](double) { return gap(); }));
  EXPECT_TRUE(trusts_after(300, [](double actual) { return actual; }));
}

TEST_F(HintTrustTest, a_fifth_of_wrong_hints_is_tolerated) {
  std::bernoulli_distribution is_wrong(0.2);
  EXPECT_TRUE(trusts_after(300, [&](double actual) { return is_wrong(random_) ? gap() : actual; }));
}

TEST_F(HintTrustTest, sessions_that_return_although_they_never_should_count) {
  EXPECT_FALSE(trusts_after(
      300, [](double actual) { return actual <= 30 ? std::numeric_limits<double>::infinity() : actual; }));
}

TEST_F(HintTrustTest, equal_hints_say_nothing_wrong) {
  EXPECT_TRUE(trusts_after(300, [](double) { return 20.0; }));
}

}  // namespace
}  // namespace kv_offload
