// SPDX-License-Identifier: Apache-2.0
// When a store checks for a record before it writes one.
#include "tier/existence_check_policy.h"

#include <gtest/gtest.h>

namespace kv_offload {
namespace {

// Returns how many of `writes` writes check first; no check finds a record.
unsigned asked_of(ExistenceCheckPolicy& existence_check_policy, unsigned writes) {
  unsigned asked = 0;
  for (unsigned i = 0; i < writes; ++i) {
    if (!existence_check_policy.should_check()) continue;
    existence_check_policy.record_result(false);
    ++asked;
  }
  return asked;
}

TEST(ExistenceCheckPolicyTest, every_write_checks_until_a_run_of_misses_shows_a_single_writer) {
  ExistenceCheckPolicy existence_check_policy;
  EXPECT_EQ(asked_of(existence_check_policy, ExistenceCheckPolicy::kMissesToSkip),
            ExistenceCheckPolicy::kMissesToSkip);
  EXPECT_EQ(asked_of(existence_check_policy, 10 * ExistenceCheckPolicy::kCheckInterval), 10u);
}

TEST(ExistenceCheckPolicyTest, a_record_written_by_another_restarts_the_run) {
  ExistenceCheckPolicy existence_check_policy;
  asked_of(existence_check_policy, ExistenceCheckPolicy::kMissesToSkip - 1);
  existence_check_policy.record_result(true);
  EXPECT_EQ(asked_of(existence_check_policy, ExistenceCheckPolicy::kMissesToSkip),
            ExistenceCheckPolicy::kMissesToSkip);
  existence_check_policy.record_result(true);  // one of the few writes that still check
  EXPECT_EQ(asked_of(existence_check_policy, ExistenceCheckPolicy::kMissesToSkip),
            ExistenceCheckPolicy::kMissesToSkip);
}

}  // namespace
}  // namespace kv_offload
