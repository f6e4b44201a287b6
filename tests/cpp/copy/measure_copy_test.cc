// SPDX-License-Identifier: Apache-2.0
#include "copy/measure_copy.h"

#include <gtest/gtest.h>

#include "base/status.h"

namespace kv_offload {
namespace {

TEST(MeasureCopy, measured_speed_is_positive_for_any_size) {
  EXPECT_GT(measure_copy(1, 1), 0);
  EXPECT_GT(measure_copy(5 << 20, 2), 0);
}

TEST(MeasureCopy, zero_bytes_or_zero_threads_are_refused) {
  EXPECT_THROW(measure_copy(0, 1), InvalidArgument);
  EXPECT_THROW(measure_copy(1 << 20, 0), InvalidArgument);
}

}  // namespace
}  // namespace kv_offload
