// SPDX-License-Identifier: Apache-2.0
#include "record/measure_codec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace kv_offload {
namespace {

using ::testing::StartsWith;

TEST(MeasureCodec, measures_a_speed) {
  const CodecSpeed speed = measure_codec();
  EXPECT_GT(speed.encode, 0);
  EXPECT_GT(speed.decode, 0);
}

TEST(MeasureCodec, advice_agrees_with_the_choice) {
  const CodecSpeed codec{1.2e9, 2.5e9};
  EXPECT_THAT(advice(codec, 500e6, 500e6), StartsWith("on: a read of 1 MiB takes 2.10 ms raw and 1.8"));
  EXPECT_THAT(advice(codec, 3e9, 2e9), StartsWith("off: a read of 1 MiB takes 0.35 ms raw and "));
  EXPECT_THAT(advice({0.2e9, 0.3e9}, 500e6, 500e6), StartsWith("off: ")) << "a slow codec";
  EXPECT_THAT(advice({}, 100e6, 100e6), StartsWith("on: ")) << "a codec of unknown speed";
  EXPECT_THAT(advice(codec, 0, 0), StartsWith("off: too little"));
}

}  // namespace
}  // namespace kv_offload
