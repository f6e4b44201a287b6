// SPDX-License-Identifier: Apache-2.0
// The control for the leak check at the end of the asan stage (tests/run.sh). The stage runs this
// test, which is disabled elsewhere, and requires it to fail.
#include <gtest/gtest.h>

#include <vector>

namespace {

void leak() {
  auto* lost = new std::vector<int>(1000, 7);
  EXPECT_EQ(lost->size(), 1000u);
}

TEST(LeakCheck, DISABLED_a_leak_is_reported) { leak(); }

}  // namespace
